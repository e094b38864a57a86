"""What a process said last, in one line for people. Knows our JSON log lines and anybody's plain ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

TAIL_BYTES: Final = 8192
MAX_CHARS: Final = 200
_UNSAID: Final = frozenset({"time", "level", "actor", "pid", "event", "traceback"})


def last_words(path: str | Path) -> str:
    """The last line of a log file as a sentence; empty if there is no such file or nothing in it."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return sentence(lines[-1]) if lines else ""


def sentence(line: str) -> str:
    """One log line in words: the event and its fields, the end of a traceback, or the line as it is."""
    event = _event(line)
    if event is None:
        return _short(line.strip())
    words = [str(event["event"])]
    words += [f"{key}={_value(value)}" for key, value in event.items() if key not in _UNSAID]
    trace = str(event.get("traceback", "")).strip().splitlines()
    return _short(" ".join(words + trace[-1:]))


def _event(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable if len(printable) <= MAX_CHARS else printable[: MAX_CHARS - 1] + "…"
