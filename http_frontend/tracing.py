"""Request ids, W3C trace context, and the access log. Never writes prompts.

Where the package ``opentelemetry-api`` is installed, each request is also a span of whatever exporter the
operator has configured; without it, nothing here changes but that.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import re
import secrets
import sys
import time
from datetime import UTC, datetime
from typing import Any, Final, TextIO

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


class Spans:
    """OpenTelemetry spans, if the package is there."""

    def __init__(self) -> None:
        self._tracer: Any = None
        self._propagate: Any = None
        try:
            self._tracer = importlib.import_module("opentelemetry.trace").get_tracer("loadonce.http_frontend")
            self._propagate = importlib.import_module("opentelemetry.propagate")
        except ImportError:
            return

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        return self._tracer is not None

    def start(self, route: str, method: str, parent: str) -> tuple[Any, str]:
        """Begin a span; returns it (None without the package) and the traceparent to hand on."""
        if self._tracer is None:
            return None, parent
        context = self._propagate.extract({"traceparent": parent} if parent else {})
        span = self._tracer.start_span(f"{method} {route}", context=context)
        carrier: dict[str, str] = {}
        trace = importlib.import_module("opentelemetry.trace")
        self._propagate.inject(carrier, context=trace.set_span_in_context(span, context))
        return span, carrier.get("traceparent", parent)

    def end(self, span: Any, status: int, model: str) -> None:
        """End it."""
        if span is not None:
            span.set_attribute("http.response.status_code", status)
            span.set_attribute("gen_ai.request.model", model)
            span.end()
