"""One JSON line per event on standard error. Knows nothing of who reads it.

A line is ``{"time": …, "level": …, "actor": …, "event": …, <fields>}``; `time` is for people (UTC, from
the wall clock), never for decisions. Text is escaped to ASCII, so a lone surrogate or a control
character in a prompt or a model name can't break a line or a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, TextIO

LEVELS: Final = ("debug", "info", "warning", "error")
SELDOM_S: Final = 1.0


class Log:
    """Writes events of one actor.

    Args:
        actor: ``broker``, ``worker/gpu0``, ``frontend`` …; the first thing that a reader looks for.
        level: the least of `LEVELS` that is written.
        stream: where to; standard error unless a test says otherwise.
    """

    def __init__(self, actor: str, *, level: str = "info", stream: TextIO | None = None) -> None:
        if level not in LEVELS:
            raise ValueError(f"log level must be one of {', '.join(LEVELS)}, not {level!r}")
        self._actor = actor
        self._least = LEVELS.index(level)
        self._stream = stream if stream is not None else sys.stderr
        self._pid = os.getpid()

    def debug(self, event: str, **fields: object) -> None:
        """An event that only somebody hunting a fault wants to see."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Something an operator expects to see."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something went wrong and was dealt with."""
        self._write("warning", event, fields)

    def error(self, event: str, *, exc: BaseException | None = None, **fields: object) -> None:
        """Something went wrong and somebody lost by it; `exc` is logged whole."""
        if exc is not None:
            fields["traceback"] = "".join(traceback.format_exception(exc))
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        if LEVELS.index(level) < self._least:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "actor": self._actor,
            "pid": self._pid,
            "event": event,
            **fields,
        }
        try:
            self._stream.write(json.dumps(line, default=str, ensure_ascii=True) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # A full disk or a closed pipe must not stop serving: the line is lost, the actor goes on.
            return


class Seldom:
    """Lets what may happen thousands of times a second be said once a second.

    Args:
        say: gets how often it happened since the last time, and the latest reason.
    """

    def __init__(self, say: Callable[[int, str], None]) -> None:
        self._say = say
        self._count = 0
        self._said_at = float("-inf")

    def note(self, reason: str) -> None:
        """It happened."""
        self._count += 1
        now = time.monotonic()
        if now - self._said_at >= SELDOM_S:
            count, self._count, self._said_at = self._count, 0, now
            self._say(count, reason)
