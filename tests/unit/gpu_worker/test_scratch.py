"""A folder in the making is nobody else's, and nothing of it stays when its process ends, however that is."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpu_worker.scratch import PREFIX, scratch, sweep

HOLDER = """
import os, signal, sys
from pathlib import Path
from gpu_worker.scratch import scratch

signal.signal(signal.SIGTERM, lambda *_: os._exit(5))  # as a worker does while it loads
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts what runs in the background with it ignored
with scratch(Path(sys.argv[1])) as made:
    (made / "model.safetensors").touch()
    print(made, flush=True)
    while True:
        signal.pause()
"""


def start_holder(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process in the middle of its work, and its folder."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: int) -> int:
    with process:
        process.send_signal(number)
        try:
            process.wait(timeout=10)
        finally:
            process.kill()
    return process.returncode


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_that_ends_the_process_takes_the_folder_with_it(
    tmp_path: Path, number: int, code: int
) -> None:
    process, made = start_holder(tmp_path)
    assert made.is_dir()
    assert end(process, number) == code, "what the signal does is as before"
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept_and_what_is_in_use_or_anothers_is_not(tmp_path: Path) -> None:
    killed, left = start_holder(tmp_path)
    running, used = start_holder(tmp_path)
    end(killed, signal.SIGKILL)
    finished = tmp_path / "0123456789abcdef"
    finished.mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    sweep(tmp_path)
    assert not left.exists()
    assert (used / "model.safetensors").is_file() and finished.is_dir()
    assert (tmp_path / f"{PREFIX}file").is_file()
    end(running, signal.SIGTERM)


def test_what_was_renamed_stays_and_what_failed_does_not(tmp_path: Path) -> None:
    with scratch(tmp_path) as made:
        (made / "file").touch()
        made.rename(tmp_path / "done")
    with pytest.raises(ValueError, match="broken"), scratch(tmp_path):
        raise ValueError("broken")
    assert [path.name for path in tmp_path.iterdir()] == ["done"]
    assert (tmp_path / "done" / "file").is_file()


def test_signals_do_what_they_did_once_the_folder_is_done(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with scratch(tmp_path):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_is_ignored_takes_nothing_away(tmp_path: Path, number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with scratch(tmp_path) as made:
            signal.raise_signal(number)
            assert made.is_dir()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_folder_that_is_swept_before_its_lock_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tempfile.mkdtemp
    swept: list[str] = []

    def mkdtemp(dir: Path, prefix: str) -> str:
        made = plain(dir=dir, prefix=prefix)
        if not swept:
            swept.append(made)
            sweep(tmp_path)
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with scratch(tmp_path) as made:
        assert made.is_dir() and str(made) not in swept


def test_where_folders_can_not_be_locked_it_works_and_sweeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("gpu_worker.scratch.fcntl.flock", flock)
    with scratch(tmp_path) as made:
        sweep(tmp_path)
        assert made.is_dir()
