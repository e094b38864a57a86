"""supervisord's event listener: when a process ends, the broker hears of a dead worker at once.

Without it the broker would notice after `protocol.LIVENESS_S` of silence. Which process a worker is, the
broker knows; the listener asks it and reports every worker of this host whose process is gone, so it needs
no names, and an event that carries no pid (an end soon after the start) is as good as one that does.
Speaks supervisord's protocol on standard input and output; what it has to say to people goes to standard
error. A broker that doesn't answer is logged and costs nothing but the head start.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import BinaryIO, Final

from broker import protocol as p
from broker.admin import ask, ask_status
from broker.errors import LoadOnceError
from broker.logs import Log
from broker.status import Status

TIMEOUT_S: Final = 2.0
#: So many crashes within so many seconds are a loop. supervisord itself gives a program up only if it crashes
#: within its `startsecs`; one that loads its model first and dies then is started again for ever.
LOOP_CRASHES: Final = 4
LOOP_S: Final = 1800.0
ENDED: Final = frozenset(
    {"PROCESS_STATE_EXITED", "PROCESS_STATE_BACKOFF", "PROCESS_STATE_STOPPED", "PROCESS_STATE_FATAL"}
)


def departed(status: Status, host: str, alive: Callable[[int], bool]) -> list[tuple[str, int]]:
    """Name and pid of each registered worker on `host` whose process no longer is."""
    return [(w.name, w.pid) for w in status.workers if w.host == host and not alive(w.pid)]


def process_lives(pid: int) -> bool:
    """Whether a process with that id exists, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Crashes:
    """Counts each process's unexpected ends."""

    def __init__(self) -> None:
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LOOP_CRASHES))

    def count(self, process: str, now: float) -> float | None:
        """Note one; returns the seconds within which the last `LOOP_CRASHES` fell, if that is a loop."""
        times = self._times[process]
        times.append(now)
        span = now - times[0]
        return span if len(times) == LOOP_CRASHES and span <= LOOP_S else None


def report(log: Log) -> None:
    """Tell the broker which workers are gone; says in the log what came of it."""
    try:
        gone = departed(ask_status(timeout_s=TIMEOUT_S), socket.gethostname(), process_lives)
        for name, pid in gone:
            said, _ = ask(p.AdminGone(pid=pid, worker=name), timeout_s=TIMEOUT_S)
            log.info("worker_gone", worker=name, worker_pid=pid, broker=said)
    except LoadOnceError as problem:
        log.warning("broker_not_told", reason=problem.message)


def fields(line: bytes) -> dict[str, str]:
    """The ``key:value`` pairs of a line of supervisord's."""
    return dict(pair.split(":", 1) for pair in line.decode().split() if ":" in pair)


def listen(incoming: BinaryIO, outgoing: BinaryIO, log: Log) -> None:
    """Handle events until supervisord closes the pipe."""
    crashes = Crashes()
    while True:
        outgoing.write(b"READY\n")
        outgoing.flush()
        line = incoming.readline()
        if not line:
            return
        header = fields(line)
        payload = incoming.read(int(header["len"]))
        if header["eventname"] in ENDED:
            event = fields(payload.splitlines()[0])
            name = f"{event.get('groupname')}:{event.get('processname')}"
            log.info("process_ended", process=name, state=header["eventname"][14:], was=event["from_state"])
            if event.get("expected") == "0" and (span := crashes.count(name, time.monotonic())) is not None:
                log.error("crash_loop", process=name, crashes=LOOP_CRASHES, seconds=round(span))
            report(log)
        outgoing.write(b"RESULT 2\nOK")
        outgoing.flush()


def main() -> int:
    """Listen until supervisord ends; returns the exit code."""
    log = Log("exit_listener")
    if "SUPERVISOR_SERVER_URL" not in os.environ:
        print(
            "python -m broker.exit_listener: supervisord starts this one, see supervisord.conf",
            file=sys.stderr,
        )
        return 2
    listen(sys.stdin.buffer, sys.stdout.buffer, log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
