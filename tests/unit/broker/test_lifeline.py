"""A process under supervisord doesn't outlive it; one that was started by hand isn't touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from broker.lifeline import MARK, end_with_supervisor, orphaned

CHILD = """
import time
from broker.lifeline import end_with_supervisor
end_with_supervisor()
print("up", flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def grandchild(environment: dict[str, str]) -> int:
    """The pid of a process whose parent was killed."""
    command = [sys.executable, "-c", PARENT]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL
    return int(done.stdout)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_it_ends_when_a_supervisord_that_started_it_is_killed() -> None:
    pid = grandchild({**os.environ, MARK: "1"})
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(pid)


def test_a_supervisord_that_was_gone_before_we_could_ask_counts_as_killed(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "cmdline").write_bytes(b"/sbin/init\0")
    assert orphaned(1, tmp_path)
    assert not orphaned(4711, tmp_path)
    (tmp_path / "1" / "cmdline").write_bytes(b"python\0/app/.venv/bin/supervisord\0-n\0")
    assert not orphaned(1, tmp_path)
    assert not orphaned(1, tmp_path / "hidden")


def test_started_by_hand_it_is_left_alone() -> None:
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    assert not end_with_supervisor(environment)
    pid = grandchild(environment)
    try:
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
