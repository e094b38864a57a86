"""A folder that one process fills and then renames to what it is to be. Nothing of it stays if that fails.

Its maker holds a lock on it that the kernel lets go when the process ends, however it ends, so that whoever
comes next knows what is left over. Knows nothing of what is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

PREFIX: Final = "converting-"


@contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A new folder in `directory`, removed at the end unless it was renamed; also at SIGTERM and SIGINT."""
    made, lock = _make(directory)
    try:
        with _removed_on_signals(made):
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def sweep(directory: Path) -> None:
    """Remove what is left here of processes that were killed."""
    for left in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is in use, or gone, or can't be locked and so not be judged
            lock = _open(left)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _make(directory: Path) -> tuple[Path, int]:
    """The folder and the descriptor that holds its lock."""
    while True:
        made = Path(tempfile.mkdtemp(dir=directory, prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # a sweep came between
            lock = _open(made)
            with contextlib.suppress(OSError):  # where folders can't be locked, as on NFS, none is swept
                fcntl.flock(lock, fcntl.LOCK_EX)
            if made.is_dir():
                return made, lock
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def _removed_on_signals(folder: Path) -> Iterator[None]:
    """Remove `folder` first when a signal is about to end the process, then do what would have been done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what signals do
        return

    def leave(number: int, frame: FrameType | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, before[number])
        signal.raise_signal(number)

    before = {
        int(number): signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT)
        if signal.getsignal(number) is not signal.SIG_IGN  # as in a shell's background: it ends nothing
    }
    try:
        for number in before:
            signal.signal(number, leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
