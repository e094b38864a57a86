"""`make run`: supervisord in the foreground, the progress of the load and, once it can answer, how to ask.

Starts supervisord with the shipped supervisord.conf, one worker for each GPU (LOADONCE_WORKER_COUNT
overrides), and ends when supervisord ends. Ctrl-C or SIGTERM stops everything; a second one at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final
from xmlrpc.client import Error, ServerProxy

from supervisor.xmlrpc import SupervisorTransport

from broker.admin import ask_status
from broker.errors import LoadOnceError
from broker.lifeline import PR_SET_PDEATHSIG
from broker.options import SettingError, read
from broker.pool_view import Process
from broker.process_log import last_words
from http_frontend.settings import FrontendSettings

ROOT: Final = Path(__file__).resolve().parents[1]
POLL_S: Final = 0.25
COUNT: Final = "LOADONCE_WORKER_COUNT"

EXIT_USAGE: Final = 2
EXIT_TAKEN: Final = 3
EXIT_CANNOT_SERVE: Final = 4


class CannotStart(Exception):
    """Why nothing was started, and with which exit code to say so."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


def main(root: Path = ROOT) -> int:
    """Run until supervisord ends; returns the exit code."""
    try:
        settings = read(FrontendSettings, {}, os.environ)
        check_free(root, settings)
        override = write_override(root, worker_count(os.environ))
    except SettingError as problem:
        return say_why(problem, EXIT_USAGE)
    except CannotStart as problem:
        return say_why(problem, problem.code)
    with removed_with_us(override):
        return Pool(root, settings).run()


def say_why(problem: Exception, code: int) -> int:
    """One line about what is wrong; returns the exit code."""
    print(f"make run: {problem}", file=sys.stderr)
    return code


# ── before the start ─────────────────────────────────────────────────────────────────────────────


def check_free(root: Path, settings: FrontendSettings) -> None:
    """See that no other pool has this directory or our port.

    Raises:
        CannotStart: one has, or supervisord can't live in this directory.
    """
    if "%" in str(root):
        raise CannotStart(f"supervisord can't be started in {root}: its path has a percent sign", EXIT_USAGE)
    try:
        running = supervisor(root).supervisor.getPID()
        raise CannotStart(
            f"supervisord runs here already (pid {running}): supervisorctl shutdown", EXIT_TAKEN
        )
    except (OSError, Error):
        pass  # nobody answers at its socket
    if settings.port == 0:
        raise CannotStart("LOADONCE_PORT=0: the frontends share one port, so it must be named", EXIT_USAGE)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as problem:
            where = f"{settings.host}:{settings.port}"
            reason = (
                f"can't listen on {where} ({problem.strerror}); for another port: LOADONCE_PORT=8001 make run"
            )
            raise CannotStart(reason, EXIT_TAKEN) from None


def worker_count(environ: Mapping[str, str]) -> int | None:
    """How many workers to start: what `COUNT` says, one for each GPU, or None for supervisord.conf's number.

    Raises:
        CannotStart: `COUNT` isn't a number from 1 on.
    """
    given = environ.get(COUNT, "")
    if given:
        if not given.isdecimal() or int(given) < 1:
            raise CannotStart(f"{COUNT}: expected a number from 1 on, got {given!r}", EXIT_USAGE)
        return int(given)
    if environ.get("LOADONCE_DEVICE", "auto") not in ("", "auto"):
        return None
    return gpu_count(environ.get("CUDA_VISIBLE_DEVICES")) or None


def gpu_count(visible: str | None, driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """GPUs that a worker could use, without asking CUDA.

    Args:
        visible: CUDA_VISIBLE_DEVICES, or None if it isn't set.
        driver: where the NVIDIA driver lists what it has.
    """
    present = len(list(driver.glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    if visible is None or not present:
        return present
    return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])


def write_override(root: Path, workers: int | None) -> Path:
    """Have supervisord.conf include the number of workers; returns the file, which may not exist."""
    path = root / "run" / "automatic.conf"
    path.unlink(missing_ok=True)
    if workers is not None:
        path.write_text(f"; by make run, removed when it ends\n[program:worker]\nnumprocs={workers}\n")
    return path


@contextlib.contextmanager
def removed_with_us(path: Path) -> Iterator[None]:
    """Have `path` removed when this block ends, or this process, however it does: a shell waits for that."""
    shell = ["sh", "-c", 'cat > /dev/null; rm -f "$1"', "sh", str(path)]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, start_new_session=True):
        yield


def supervisor(root: Path) -> Any:
    """A proxy for the supervisord of this directory."""
    transport = SupervisorTransport("", "", f"unix://{root}/run/supervisor.sock")
    return ServerProxy("http://127.0.0.1", transport)


# ── while it runs ────────────────────────────────────────────────────────────────────────────────


class Pool:
    """supervisord as a child, watched until it ends.

    Args:
        root: the directory of supervisord.conf.
        settings: where the frontends listen.
    """

    def __init__(self, root: Path, settings: FrontendSettings) -> None:
        self._root = root
        scheme = "https" if settings.tls_cert else "http"
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
        self.url = f"{scheme}://{host}:{settings.port}"
        self._settings = settings
        self._processes: list[Process] = []
        self._said: dict[str, str] = {}
        self._old_logs = {path: path.stat().st_mtime_ns for path in (root / "run").glob("*.log")}
        self._stops = 0
        self._code: int | None = None  # ours instead of supervisord's, once it is known
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start, watch, stop; returns supervisord's exit code, or ours if nothing could be served."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        command = [str(self._root / ".venv" / "bin" / "supervisord"), "--nodaemon", "--silent"]
        command += ["--configuration", str(self._root / "supervisord.conf")]
        print("starting under supervisord; Ctrl-C stops everything", flush=True)
        started, ready = time.monotonic(), False
        # A session of its own: the terminal's Ctrl-C comes to us alone, and we pass it on once.
        self._child = subprocess.Popen(
            command, cwd=self._root, start_new_session=True, preexec_fn=_end_with_us
        )
        while self._child.poll() is None:
            time.sleep(POLL_S)
            if self._stops:
                continue
            self._look()
            if not ready and self._ready():
                ready = True
                self._announce(time.monotonic() - started)
            elif not ready and self._hopeless():
                self._code = EXIT_CANNOT_SERVE
                self._stop(signal.SIGTERM, None)
        print("stopped" if self._stops else "supervisord has ended", flush=True)
        return self._code if self._code is not None else self._child.returncode

    def _look(self) -> None:
        """Say what has changed since the last look."""
        try:
            found = supervisor(self._root).supervisor.getAllProcessInfo()
        except (OSError, Error):
            return  # not there yet, or going
        self._processes = [Process.of(info) for info in found]
        for process in self._processes:
            words = self._words(process)
            if process.state in ("BACKOFF", "FATAL"):
                self._say(process.name, f"{process.state}: {words}")
            elif process.is_worker and words:
                self._say(process.name, words)

    def _words(self, process: Process) -> str:
        """What it said last in this run."""
        path = Path(process.log)
        if not process.log or not path.exists() or path.stat().st_mtime_ns == self._old_logs.get(path):
            return ""
        return last_words(path)

    def _say(self, name: str, words: str) -> None:
        if self._said.get(name) != words:
            self._said[name] = words
            print(f"  {name.split(':')[-1]}: {words}", flush=True)

    def _ready(self) -> bool:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is we ourselves
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=2, context=context) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as refused:
            # With API keys the route wants one, and we have none: the frontend lives, so ask the broker.
            return refused.code in (401, 403) and _workers_ready()
        except (OSError, urllib.error.URLError, ValueError):
            return False

    def _hopeless(self) -> bool:
        """Whether a whole kind of process has given up."""
        kinds = ("broker", "workers:", "frontends:")
        of_kind = [[p.state for p in self._processes if p.name.startswith(kind)] for kind in kinds]
        return any(states and set(states) == {"FATAL"} for states in of_kind)

    def _announce(self, seconds: float) -> None:
        key = " -H 'Authorization: Bearer YOUR-KEY'" if self._settings.api_keys else ""
        insecure = "-k " if self._settings.tls_cert else ""
        print(
            f"\nready after {seconds:.1f} s: {self.url}  (console at /, documentation at /docs)\n\n"
            f"  curl {insecure}{self.url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
            '    -d \'{"messages": [{"role": "user", "content": "What is the capital of France?"}],'
            ' "temperature": 0}\'\n\n'
            "  .venv/bin/supervisorctl pool status\n",
            flush=True,
        )

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1
        if self._child is None:
            raise SystemExit(128 + number)
        if self._stops == 1:
            print("\nstopping (again to stop at once)", flush=True)
            self._child.terminate()
            return
        for process in self._processes:
            if process.pid:
                _kill_group(process.pid)
        self._child.kill()


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _end_with_us() -> None:
    """In the child: supervisord stops, and stops the rest, if we are killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _workers_ready() -> bool:
    """Whether the broker has a worker that takes work."""
    try:
        return any(model.ready for model in ask_status(timeout_s=2.0).models)
    except LoadOnceError:
        return False


if __name__ == "__main__":
    sys.exit(main())
