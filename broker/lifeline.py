"""A process that supervisord started ends with it, even if supervisord is killed. Part of the public face."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
MARK: Final = "SUPERVISOR_ENABLED"  # supervisord sets it in its children's environment


def end_with_supervisor(
    environ: Mapping[str, str] = os.environ, number: signal.Signals = signal.SIGTERM
) -> bool:
    """Ask the kernel for a signal when our parent ends, if it is supervisord; returns whether it is.

    Sends the signal at once if supervisord ended before we could ask.

    Args:
        environ: tells whether supervisord started us.
        number: the signal; SIGTERM ends us cleanly.

    Raises:
        OSError: the kernel refuses.
    """
    if MARK not in environ:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if orphaned(os.getppid(), Path("/proc")):
        os.kill(os.getpid(), number)
    return True


def orphaned(parent: int, proc: Path) -> bool:
    """Whether we were handed to init; in a container, supervisord itself may be init."""
    if parent != 1:
        return False
    try:
        return b"supervisord" not in (proc / "1" / "cmdline").read_bytes()
    except OSError:
        return False
