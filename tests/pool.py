"""Starts real processes in a directory of their own, waits for conditions, and ends them by pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import pytest

from broker.admin import ask_status
from broker.client import Client
from broker.errors import LoadOnceError
from broker.status import Status, WorkerStatus

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 30.0
T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Ask until the answer is true; fails the test after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(LoadOnceError):
            found = condition()
            if found:
                return found
        if time.monotonic() > until:
            pytest.fail(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.02)


class Pool:
    """A broker and what belongs to it, each a process of its own.

    Args:
        directory: short enough for socket paths; sockets and logs go there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []
        self.environment = {**os.environ, "LOADONCE_RUN_DIR": str(directory), "HF_HUB_OFFLINE": "1"}

    @property
    def clients(self) -> str:
        """The broker's address for clients."""
        return f"ipc://{self.directory}/clients"

    @property
    def admin(self) -> str:
        """The broker's address for admins."""
        return f"ipc://{self.directory}/admin"

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a Python program (arguments after the interpreter) under a name of ours."""
        log = (self.directory / f"{name}.log").open("ab")
        self._logs.append(log)
        self.processes[name] = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**self.environment, **environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        return self.processes[name]

    def broker(self, *flags: str) -> subprocess.Popen[bytes]:
        """Start a broker and wait until it answers."""
        process = self.start("broker", "-m", "broker", *flags)
        wait_for(self.status, "the broker")
        return process

    def scripted(self, name: str = "gpu0", *flags: str) -> subprocess.Popen[bytes]:
        """Start a scripted worker and wait until it is registered."""
        process = self.start(name, "examples/scripted_worker.py", "--name", name, *flags)
        wait_for(lambda: self.worker(name, process.pid), f"worker {name}")
        return process

    def worker(self, name: str, pid: int = 0) -> WorkerStatus | None:
        """A registered worker, as the broker sees it."""
        found = [w for w in self.status().workers if w.name == name and pid in (0, w.pid)]
        return found[0] if found else None

    def status(self) -> Status:
        """The broker's status; raises `Unavailable` while there is none."""
        return ask_status(self.admin, timeout_s=2.0)

    def client(self) -> Client:
        """A blocking client of this pool."""
        return Client(self.clients, timeout_s=60.0)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM; returns the exit code."""
        process = self.processes.pop(name)
        process.terminate()
        return process.wait(timeout_s)

    def log(self, name: str) -> str:
        """What a process has written."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        """End everything that still runs, with its process group."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for log in self._logs:
            log.close()


@contextlib.contextmanager
def running_pool() -> Iterator[Pool]:
    """A pool in a fresh directory; on a failure its logs are shown."""
    directory = Path(tempfile.mkdtemp(prefix="lo-"))
    pool = Pool(directory)
    try:
        yield pool
    except BaseException:
        for path in sorted(directory.glob("*.log")):
            print(f"── {path.name} ──\n{path.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        pool.close()
        shutil.rmtree(directory, ignore_errors=True)
