"""The shipped supervisord.conf under the real supervisord, in a directory and on a port of its own.

The conf is copied as it is. What a test wants otherwise it writes into run/test.conf, which the conf's
last section includes: by default scripted workers, since most tests are about processes, not models.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.admin import ask_status
from broker.client import Client
from broker.errors import LoadOnceError
from broker.status import Status
from examples.scripted_worker import scripted
from tests.pool import PATIENCE_S, ROOT, wait_for

SCRIPTED = """
[program:worker]
command="{python}" "{root}/examples/scripted_worker.py" --name %(program_name)s%(process_num)d {flags}
numprocs={workers}
startsecs=1
"""


class Supervised:
    """A directory with the shipped conf, and its supervisord.

    Args:
        directory: short enough for socket paths.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "run").mkdir(parents=True)
        shutil.copy(ROOT / "supervisord.conf", directory)
        (directory / ".venv").symlink_to(sys.prefix)
        self.port = _free_port()
        # What identifies our processes, grandchildren included, is this variable in their environment.
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("LOADONCE_", "SUPERVISOR"))
        }
        self.environment |= {
            "LOADONCE_RUN_DIR": str(directory / "s"),
            "LOADONCE_PORT": str(self.port),
            "HF_HUB_OFFLINE": "1",
        }
        self._client: Client | None = None

    # ── what it runs ─────────────────────────────────────────────────────────────────────────────

    def override(self, text: str, name: str = "test") -> None:
        """Sections that win over the shipped ones."""
        (self.directory / "run" / f"{name}.conf").write_text(text)

    def scripted(self, workers: int = 2, flags: str = "--steps-per-s 100", more: str = "") -> None:
        """Scripted workers instead of models; `more` are lines for their section."""
        text = SCRIPTED.format(python=sys.executable, root=ROOT, workers=workers, flags=flags)
        self.override(text + more + "\n")

    def start(self) -> None:
        """Start supervisord as the manual says, and wait until it has everything running."""
        command = [
            str(self.directory / ".venv/bin/supervisord"),
            "-c",
            str(self.directory / "supervisord.conf"),
        ]
        subprocess.run(command, env=self.environment, cwd="/", check=True, timeout=30)
        wait_for(lambda: self.states(), "supervisord")

    def start_ready(self) -> None:
        """Start, and wait until a request can be answered."""
        self.start()
        wait_for(self.ready, "the pool to be ready", 120)

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    def ctl(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run supervisorctl."""
        command = [
            str(self.directory / ".venv/bin/supervisorctl"),
            "-c",
            str(self.directory / "supervisord.conf"),
        ]
        return subprocess.run(
            [*command, *words],
            env=self.environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def states(self) -> dict[str, str]:
        """The state of each process, by its name for supervisorctl; empty if there is no supervisord."""
        lines = [line.split() for line in self.ctl("status").stdout.splitlines()]
        known = {"STARTING", "RUNNING", "BACKOFF", "FATAL", "STOPPED", "STOPPING", "EXITED"}
        return {words[0]: words[1] for words in lines if len(words) > 1 and words[1] in known}

    def wait_state(self, name: str, state: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a process is in a state."""
        wait_for(lambda: self.states().get(name) == state, f"{name} to be {state}", timeout_s)

    def pid(self, name: str) -> int:
        """The pid of a process."""
        return int(self.ctl("pid", name).stdout)

    @property
    def supervisor_pid(self) -> int:
        """The pid of supervisord."""
        return int((self.directory / "run/supervisord.pid").read_text())

    def status(self) -> Status:
        """The broker's status; raises `Unavailable` while there is none."""
        return ask_status(self.admin, timeout_s=2.0)

    @property
    def admin(self) -> str:
        """The broker's admin address."""
        return f"ipc://{self.directory}/s/admin"

    @property
    def clients(self) -> str:
        """The broker's address for clients."""
        return f"ipc://{self.directory}/s/clients"

    def registered(self, name: str, not_pid: int = 0) -> bool:
        """Whether a worker is registered, with another pid than that one."""
        return any(w.name == name and w.pid != not_pid for w in self.status().workers)

    def processes(self) -> dict[int, str]:
        """Command lines of every living process that belongs to this directory, supervisord too."""
        mark = f"LOADONCE_RUN_DIR={self.directory}/s".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                alive = entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
                if alive and mark in entry.joinpath("environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (
                        entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
        return found

    def wait_gone(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until no process of this directory is left."""
        until = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left, f"still there after {timeout_s:g} s: {left}"

    def log(self, name: str) -> str:
        """What is in a log file of run/."""
        path = self.directory / "run" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    def http(self, path: str, body: Any = None, timeout_s: float = 60) -> tuple[int, bytes]:
        """Status and body of an answer; raises OSError if nobody listens."""
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as answer:
            with answer:
                return answer.code, answer.read()

    def ready(self) -> bool:
        """Whether /ready says so."""
        try:
            return self.http("/ready")[0] == 200
        except OSError:
            return False

    def assert_answers(self, prompt: str = "hello", seed: int = 7, tokens: int = 5) -> None:
        """Ask over HTTP and compare with what a scripted worker must say."""
        body = {"prompt": prompt, "max_new_tokens": tokens, "gen_params": {"seed": seed}}
        status, answer = self.http("/generation", body)
        assert status == 200, answer
        expected = prompt + "".join(scripted(prompt, seed, tokens))
        assert json.loads(answer)["data"][0]["generated_text"] == expected

    def client(self) -> Client:
        """A raw client of this pool, closed with it."""
        if self._client is None:
            self._client = Client(self.clients, timeout_s=60)
        return self._client

    # ── ending ───────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Stop everything; what is left after the grace is killed."""
        if self._client is not None:
            self._client.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ctl("shutdown", timeout_s=10)
        until = time.monotonic() + 10
        while self.processes() and time.monotonic() < until:
            time.sleep(0.05)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def supervised(name: str = "") -> Iterator[Supervised]:
    """A fresh directory, ready for `start`; shows all logs if the test fails."""
    outer = Path(tempfile.mkdtemp(prefix="lo-"))
    place = Supervised(outer / name if name else outer)
    try:
        yield place
    except BaseException:
        for path in sorted((place.directory / "run").glob("*.log")):
            print(f"── {path.name} ──\n{path.read_text(errors='replace')[-20000:]}")
        raise
    finally:
        place.close()
        shutil.rmtree(outer, ignore_errors=True)


def gone(place: Supervised) -> bool:
    """Whether nobody answers at the broker any more."""
    try:
        place.status()
    except LoadOnceError:
        return True
    return False


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
