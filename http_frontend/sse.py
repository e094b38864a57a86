"""Server-sent events on a connection: each event one JSON object, whole; heartbeats; slow readers dropped.

Every write goes straight into the transport, whose unsent bytes are the only buffer there is; a client that
lets them grow past the bound is disconnected. Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11

from http_frontend.errors import answer_to
from http_frontend.replies import SAFE_HEADERS, status_line

DONE: Final = b"[DONE]"
_HEAD: Final = (
    status_line(200)
    + b"Content-Type: text/event-stream; charset=utf-8\r\n"
    + b"Cache-Control: no-cache\r\n"
    + b"X-Accel-Buffering: no\r\n"  # nginx: pass each event on as it comes
    + SAFE_HEADERS
)
#: What comes at once isn't held against its reader, up to so many times the bound.
_AT_ONCE: Final = 64
# Legal inside JSON, but readers that split lines as Python's str.splitlines does would cut there.
_LINE_ENDS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


class SlowReader(ConnectionError):
    """The client reads more slowly than the model writes, by more than the bound."""


def event(data: bytes) -> bytes:
    """The bytes of an event whose data is one line of JSON."""
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return b"data: %s\n\n" % data


class EventStream(web.StreamResponse):
    """A stream of events as the answer to a request. Writing never waits.

    Args:
        request: what it answers.
        buffer_bytes: unsent output past which the reader is too slow; what comes at once,
            an echoed prompt or one event larger than that, is on top.
        heartbeat_s: silence after which a comment is sent.
        extra: more header lines.
    """

    def __init__(
        self, request: web.BaseRequest, *, buffer_bytes: int, heartbeat_s: float, extra: bytes
    ) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        self._status = 200
        self._transport = transport
        self._buffer_bytes = buffer_bytes
        self._excused = 0
        self._heartbeat_s = heartbeat_s
        self._chunks = request.version == HttpVersion11
        self._keep_alive = self._chunks and bool(request.keep_alive)
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._timer = self._loop.call_later(heartbeat_s, self._beat)
        self.closed = False
        framing = b"Transfer-Encoding: chunked\r\n" if self._chunks else b""
        closing = b"" if self._keep_alive else b"Connection: close\r\n"
        transport.write(b"".join((_HEAD, framing, closing, extra, b"\r\n")))
        self._unread = transport.get_write_buffer_size()

    def send(self, events: bytes, *, echoed: bool = False) -> None:
        """Send one or more whole events.

        Args:
            events: their bytes.
            echoed: they repeat the prompt. All prompts of a list may come back in one moment.

        Raises:
            SlowReader: too much is unsent; the connection is cut.
        """
        if self.closed:
            return
        self._wrote_at = self._loop.time()
        data = b"%x\r\n%s\r\n" % (len(events), events) if self._chunks else events
        self._transport.write(data)
        unread = self._transport.get_write_buffer_size()
        if echoed or self._excused or len(data) > self._buffer_bytes:
            at_once = len(data) if echoed or len(data) > self._buffer_bytes else 0
            self._excuse(at_once, read=self._unread + len(data) - unread)
        self._unread = unread
        if unread > self._buffer_bytes + self._excused:
            self._close()
            self._transport.abort()
            raise SlowReader(f"{unread} bytes unread")

    def end(self) -> None:
        """The stream ends well, or with an error that was sent: `[DONE]` and the end of the body."""
        if self.closed:
            return
        self.send(event(DONE))
        self._finish()

    def fail(self, problem: Exception) -> None:
        """End with one event that says what went wrong after the headers had gone."""
        if self.closed:
            return
        with contextlib.suppress(SlowReader):  # cut off, which is an end as well
            self.send(event(answer_to(problem).body()))
            self._finish()

    def drop(self) -> None:
        """Nothing more is sent; for when the client has gone."""
        self._close()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Called by aiohttp when the handler has returned; all is sent by then."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to send."""

    def _excuse(self, at_once: int, read: int) -> None:
        """Count the unread bytes that are no fault of the reader's: more came at once, some were read."""
        together = min(self._excused + at_once, _AT_ONCE * self._buffer_bytes)
        self._excused = max(0, max(self._excused, together, at_once) - read)

    def _finish(self) -> None:
        self._close()
        if self._chunks:
            self._transport.write(b"0\r\n\r\n")

    def _close(self) -> None:
        self.closed = True
        self._timer.cancel()

    def _beat(self) -> None:
        silent = self._loop.time() - self._wrote_at
        if silent >= self._heartbeat_s:
            try:
                self.send(b": still here\n\n")
            except SlowReader:
                return  # the connection is cut, which cancels the handler
            silent = 0.0
        self._timer = self._loop.call_later(self._heartbeat_s - silent, self._beat)
