"""`supervisorctl pool …`: look at and steer the pool, from the tool that operators already use.

A plugin of supervisorctl (`[ctlplugin:pool]`). It asks the broker about workers and requests and
supervisord about processes, joins the two by pid, and still says what it can when one of them is down.
"""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from xmlrpc.client import Fault

from supervisor.supervisorctl import ControllerPluginBase, LSBInitExitStatuses

from broker import protocol as p
from broker.admin import ask, ask_status
from broker.errors import LoadOnceError, Unavailable
from broker.pool_view import (
    Process,
    absent,
    absent_table,
    models_table,
    requests_table,
    token_rates,
    totals,
    workers_table,
)
from broker.process_log import last_words
from broker.status import Status, WorkerStatus

RATE_S: Final = 1.0  # how long tokens are counted for a rate
TOP_S: Final = 2.0
POLL_S: Final = 0.2
READY_TIMEOUT_S: Final = 1800.0  # a large model from a slow disk
CLEAR: Final = "\x1b[H\x1b[2J"

HELP: Final = """\
pool status                    workers, devices, models, load, queues; what isn't serving, and why
pool top [SECONDS]             the same, live, every 2 seconds; Ctrl-C ends it
pool requests                  what waits and runs, the oldest first
pool drain WORKER…             no new work for a worker; it finishes what it has and stays
pool resume WORKER…            work again for a drained worker
pool restart [WORKER…] [--timeout SECONDS]
                               restart all or these, one at a time, each ready before the next goes
pool cancel ID…                end requests; their clients get the error `cancelled`"""


class PoolPlugin(ControllerPluginBase):
    """The `pool` command.

    Args:
        controller: supervisorctl's own, which prints, completes and speaks to supervisord.
    """

    name = "pool"

    def __init__(self, controller: Any) -> None:
        super().__init__(controller)
        self._verbs: dict[str, Callable[[list[str]], None]] = {
            "status": self._status,
            "top": self._top,
            "requests": self._requests,
            "drain": self._drain,
            "resume": self._resume,
            "restart": self._restart,
            "cancel": self._cancel,
        }
        self._complete_others = controller.complete
        controller.complete = self.complete
        for other in controller.options.plugins:  # supervisorctl asks all of them about every topic
            other.help_pool = lambda: None

    # ── what supervisorctl calls ─────────────────────────────────────────────────────────────────

    def do_pool(self, arg: str) -> None:
        """Run one verb; what goes wrong is one line and an exit status."""
        try:
            words = shlex.split(arg)
        except ValueError as problem:
            return self._fail(f"pool: {problem}")
        if not words or words[0] not in self._verbs:
            self._fail(f"pool: {words[0]!r} isn't one of its verbs" if words else "pool: which verb?")
            return self.help_pool()
        try:
            self._verbs[words[0]](words[1:])
        except _Usage as problem:
            self._fail(f"pool {words[0]}: {problem} (see: help pool)")
        except Unavailable as problem:
            self._fail(f"pool {words[0]}: {problem.message}", LSBInitExitStatuses.NOT_RUNNING)
        except LoadOnceError as problem:
            self._fail(f"pool {words[0]}: {problem.message}")
        except KeyboardInterrupt:
            self._say("")

    def do_help(self, arg: str) -> None:
        """Help on `pool`, or the list of commands; other topics have their own plugin."""
        if arg in ("", "pool"):
            super().do_help(arg)

    def help_pool(self) -> None:
        """Say what the verbs do."""
        self._say(HELP)

    def complete(self, text: str, state: int, line: str | None = None) -> str | None:
        """Complete verbs, workers' names and request ids; leave everything else to supervisorctl."""
        if line is None:
            import readline

            line = readline.get_line_buffer()
        words = line.split()
        if not words or words[0] != "pool" or (len(words) == 1 and not line.endswith(" ")):
            found = self._complete_others(text, state, line)
            return found if found is None else str(found)
        done = words[1:] if line.endswith(" ") else words[1:-1]
        matches = [word + " " for word in self._candidates(done) if word.startswith(text)]
        return matches[state] if state < len(matches) else None

    def _candidates(self, words: Sequence[str]) -> list[str]:
        if not words:
            return list(self._verbs)
        with _silently():
            status = ask_status(timeout_s=1.0)
            if words[0] in ("drain", "resume", "restart"):
                return [w.name for w in status.workers if w.name not in words[1:]]
            if words[0] == "cancel":
                return [r.id for r in status.requests if r.id not in words[1:]]
        return []

    # ── verbs that look ──────────────────────────────────────────────────────────────────────────

    def _status(self, words: list[str]) -> None:
        _no_more(words)
        try:
            before, started = ask_status(), time.monotonic()
            if before.in_flight:
                time.sleep(RATE_S)
            after = ask_status()
        except Unavailable:
            self._say(self._not_serving(None))
            raise
        self._show(before, after, time.monotonic() - started)

    def _show(self, before: Status, after: Status, seconds: float) -> None:
        rates = token_rates(before, after, seconds)
        parts = [workers_table(after.workers, rates) if after.workers else "no worker is registered"]
        parts += [models_table(after)] if after.models else []
        parts += [self._not_serving(_pids_here(after)), totals(after)]
        self._say("\n\n".join(part for part in parts if part))

    def _not_serving(self, registered: frozenset[int] | None) -> str:
        processes = self._processes()
        if processes is None:
            return "supervisord isn't running, so nothing here restarts what ends"
        missing = absent(processes, registered)
        return absent_table(missing, last_words) if missing else ""

    def _top(self, words: list[str]) -> None:
        seconds = _seconds(words.pop(0), "SECONDS") if words else TOP_S
        _no_more(words)
        before, started = ask_status(), time.monotonic()
        while True:
            time.sleep(seconds)
            after, now = ask_status(), time.monotonic()
            self.ctl.stdout.write(CLEAR if self.ctl.stdout.isatty() else "\n")
            self._show(before, after, now - started)
            before, started = after, now

    def _requests(self, words: list[str]) -> None:
        _no_more(words)
        status = ask_status()
        self._say(requests_table(status.requests) if status.requests else "nothing waits or runs")
        if status.in_flight > len(status.requests):
            self._say(f"and {status.in_flight - len(status.requests)} more")

    # ── verbs that act ───────────────────────────────────────────────────────────────────────────

    def _drain(self, words: list[str]) -> None:
        for name in _some(words, "WORKER"):
            self._say(ask(p.AdminDrain(worker=name))[0])

    def _resume(self, words: list[str]) -> None:
        for name in _some(words, "WORKER"):
            self._say(ask(p.AdminResume(worker=name))[0])

    def _cancel(self, words: list[str]) -> None:
        for id in _some(words, "ID"):
            self._say(ask(p.AdminCancel(id=id))[0])

    def _restart(self, words: list[str]) -> None:
        timeout_s = _flag(words, "--timeout", READY_TIMEOUT_S)
        workers = self._chosen(words)
        if len(workers) == 1 and not words:
            self._say("there is only one worker: requests wait until it is back")
        for number, (worker, process) in enumerate(workers, start=1):
            self._say(f"{worker.name}: stopping, {worker.in_hand} in hand ({number} of {len(workers)})")
            took_s = self._restart_one(worker.name, process, timeout_s)
            self._say(f"{worker.name}: ready again after {took_s:.1f} s")

    def _chosen(self, names: Sequence[str]) -> list[tuple[WorkerStatus, Process]]:
        """The workers to restart, each with its process.

        Raises:
            Unavailable: supervisord isn't there.
            _Usage: a name is no worker of this host under supervisord.
        """
        status = ask_status()
        processes = self._processes()
        if processes is None:
            raise Unavailable("supervisord isn't running")
        by_pid = {process.pid: process for process in processes if process.pid}
        here = _pids_here(status)
        found = [(w, by_pid[w.pid]) for w in status.workers if w.pid in by_pid and w.pid in here]
        unknown = set(names) - {known for w, process in found for known in (w.name, process.name)}
        if unknown:
            raise _Usage(f"{', '.join(sorted(unknown))}: no such worker is registered from this supervisord")
        if not found:
            raise _Usage("no worker of this supervisord is registered")
        return [(w, process) for w, process in found if not names or {w.name, process.name} & set(names)]

    def _restart_one(self, name: str, process: Process, timeout_s: float) -> float:
        """Stop and start one worker and wait until the broker has it; returns the seconds it took.

        Raises:
            Unavailable: it didn't come back; says why.
        """
        supervisor = self.ctl.get_supervisor()
        started = time.monotonic()
        try:
            supervisor.stopProcess(process.name)
            supervisor.startProcess(process.name, False)
        except Fault as problem:
            raise Unavailable(f"{process.name}: {problem.faultString}") from None
        while time.monotonic() - started < timeout_s:
            info = Process.of(supervisor.getProcessInfo(process.name))
            if info.state == "FATAL":
                raise Unavailable(f"{name} doesn't start: {last_words(info.log)}; the others were left alone")
            if self._registered(info.pid):
                return time.monotonic() - started
            time.sleep(POLL_S)
        raise Unavailable(f"{name} wasn't ready after {timeout_s:g} s; the others were left alone")

    def _registered(self, pid: int) -> bool:
        with _silently():
            return bool(pid) and pid in _pids_here(ask_status())
        return False

    # ── within ───────────────────────────────────────────────────────────────────────────────────

    def _processes(self) -> list[Process] | None:
        """What supervisord runs, or None if it isn't there."""
        try:
            return [Process.of(info) for info in self.ctl.get_supervisor().getAllProcessInfo()]
        except OSError:
            return None

    def _say(self, text: str) -> None:
        if text:
            self.ctl.output(text)

    def _fail(self, text: str, status: int = LSBInitExitStatuses.GENERIC) -> None:
        self.ctl.exitstatus = status
        self.ctl.output(text)


class _Usage(Exception):
    """The command line can't be meant."""


def make_pool_controller(controller: Any, **config: str) -> PoolPlugin:
    """What supervisord.conf names; takes no further settings.

    Raises:
        ValueError: the section sets something.
    """
    if config:
        raise ValueError(f"[ctlplugin:pool] takes no setting {', '.join(config)}")
    return PoolPlugin(controller)


@contextmanager
def _silently() -> Iterator[None]:
    """A broker that is away is no news here."""
    try:
        yield
    except LoadOnceError:
        return


def _pids_here(status: Status) -> frozenset[int]:
    """Process ids of the registered workers of this host."""
    here = socket.gethostname()
    return frozenset(w.pid for w in status.workers if w.host == here)


def _no_more(words: Sequence[str]) -> None:
    if words:
        raise _Usage(f"{' '.join(words)!r} is too much")


def _some(words: list[str], what: str) -> list[str]:
    if not words:
        raise _Usage(f"{what} is missing")
    return words


def _seconds(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 1e6:
        raise _Usage(f"{what}: {text!r} isn't a number of seconds from 0.1 on")
    return value


def _flag(words: list[str], flag: str, default: float) -> float:
    """Take ``flag SECONDS`` out of the words."""
    if flag not in words:
        return default
    at = words.index(flag)
    if at + 1 == len(words):
        raise _Usage(f"{flag} wants a number")
    value = _seconds(words[at + 1], flag)
    del words[at : at + 2]
    return value
