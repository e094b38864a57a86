"""Where the sockets are, when nobody says otherwise: a private directory under the temporary one.

Part of the public face: broker, workers, frontends and raw clients of one user find each other with no
setting at all. ``LOADONCE_RUN_DIR`` moves all of it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

MAX_IPC_PATH: Final = 107  # sun_path of Linux, without its final zero byte


def run_dir(given: str = "") -> Path:
    """The directory of the sockets: `given`, or ``LOADONCE_RUN_DIR``, or ``/tmp/loadonce-<uid>``."""
    return Path(given or os.environ.get("LOADONCE_RUN_DIR", "") or f"/tmp/loadonce-{os.getuid()}")


def make_run_dir(given: str = "") -> Path:
    """Make the directory with mode 0700, or check that an existing one is ours and private.

    Raises:
        OSError: it can't be made, belongs to somebody else, or others may write into it.
    """
    path = run_dir(given).absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid():
        raise OSError(f"{path} belongs to user {found.st_uid}, not to us")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{path} may be written by others: chmod 700 it")
    return path


def address(which: str, given: str = "", directory: str = "") -> str:
    """The ZeroMQ address of ``clients``, ``workers`` or ``admin``: `given`, or a socket in the run directory.

    Raises:
        ValueError: the socket's path is longer than the kernel allows.
    """
    given = given or os.environ.get(f"LOADONCE_{which.upper()}", "")
    if given:
        return given
    path = str(run_dir(directory).absolute() / which)
    if len(path.encode()) > MAX_IPC_PATH:
        raise ValueError(f"{path}: a socket's path may have {MAX_IPC_PATH} bytes; set LOADONCE_RUN_DIR")
    return f"ipc://{path}"
