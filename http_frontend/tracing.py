"""Request ids, W3C trace context, and the access log. Never writes prompts."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
import sys
import time
from datetime import UTC, datetime
from typing import Final, TextIO

import msgspec

from broker.logs import LEVELS

_REQUEST_ID: Final = re.compile(r"[!-~]{1,64}")
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
FLUSH_S: Final = 0.1


class RequestIds:
    """Makes ids that no other process makes: random bits of this process and a count."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8)
        self._count = itertools.count()

    def new(self) -> str:
        """A new one, 17 to 30 visible ASCII characters."""
        return f"{self._prefix}-{next(self._count):x}"

    def accept(self, given: str | None) -> str:
        """The caller's own id if it is 1 to 64 visible ASCII characters, else a new one."""
        return given if given is not None and _REQUEST_ID.fullmatch(given) else self.new()

    def for_pool(self, request_id: str) -> str:
        """The id of a request in the pool: the caller's may come twice, so a count is added."""
        return f"{request_id[:40]}.{next(self._count):x}"


def traceparent(given: str | None) -> str:
    """The caller's trace context if it is well formed, else nothing."""
    return given if given is not None and _TRACEPARENT.fullmatch(given) else ""


class AccessLog:
    """One line for each request, in the format of `broker.logs`, written in batches.

    Args:
        actor: as in `broker.logs.Log`.
        level: the least level that is logged; lines are ``info``.
        stream: where to; standard error unless a test says otherwise.
    """

    def __init__(self, actor: str, level: str, stream: TextIO | None = None) -> None:
        self._enabled = LEVELS.index(level) <= LEVELS.index("info")
        self._stream = stream if stream is not None else sys.stderr
        self._fixed = {"level": "info", "actor": actor, "pid": os.getpid(), "event": "request"}
        self._lines: list[bytes] = []
        self._second, self._prefix = -1, ""

    def write(self, fields: dict[str, object]) -> None:
        """Note a request; it is in the log at most `FLUSH_S` later."""
        if not self._enabled:
            return
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        line = {"time": self._now(), **self._fixed, **fields}
        text = msgspec.json.encode(line)
        self._lines.append(text if text.isascii() else json.dumps(line).encode("ascii"))

    def _now(self) -> str:
        """The time as `broker.logs` writes it; the part down to the second is kept while it lasts."""
        second, part = divmod(time.time_ns() // 1_000_000, 1000)
        if second != self._second:
            self._second = second
            self._prefix = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._prefix}.{part:03d}+00:00"

    def flush(self) -> None:
        """Write what is noted."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            self._stream.write(b"\n".join(lines).decode("ascii") + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return  # as in broker.logs: a full disk must not stop serving
