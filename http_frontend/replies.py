"""A whole HTTP answer in one write: `Reply`, the one kind of response for all that isn't a stream.

aiohttp's own Response builds a header map for each answer and serialises it; most of an answer is the
same each time, so the pieces are kept ready here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11

JSON: Final = "application/json"
SAFE_HEADERS: Final = b"X-Content-Type-Options: nosniff\r\n"
_STATUS: Final = {
    s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode("ascii") for s in HTTPStatus if s.value >= 200
}


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    return _STATUS.get(status) or b"HTTP/1.1 %d Error\r\n" % status


def header_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Header lines; values come from us or were checked, so none holds a line break."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")


class Reply(web.StreamResponse):
    """An answer with its whole body. `extra` holds header lines that middlewares add on the way out.

    Args:
        status: the HTTP status.
        body: the bytes of the body.
        content_type: its type.
        extra: more header lines, each ending in CR LF.
        close: close the connection after it.
    """

    # Not calling aiohttp's constructor is the point: it makes maps that nothing here reads.
    def __init__(
        self,
        body: bytes = b"",
        *,
        status: int = 200,
        content_type: str = JSON,
        extra: bytes = b"",
        close: bool = False,
    ) -> None:
        self._status = status
        self.content = body
        self.kind = content_type
        self.extra = extra
        self._keep_alive = not close

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send it. Called by aiohttp when the handler has returned."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        keep = self._keep_alive = bool(self._keep_alive and request.keep_alive)
        connection = b""
        if request.version != HttpVersion11:
            connection = b"Connection: keep-alive\r\n" if keep else b"Connection: close\r\n"
        elif not keep:
            connection = b"Connection: close\r\n"
        head = b"%sContent-Type: %s\r\nContent-Length: %d\r\n%s%s%s\r\n" % (
            status_line(self._status),
            self.kind.encode("ascii"),
            len(self.content),
            SAFE_HEADERS,
            connection,
            self.extra,
        )
        transport.write(head if request.method == "HEAD" else head + self.content)
        if request.protocol.writing_paused:
            await self._drain(request, transport)
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to send."""

    async def _drain(self, request: web.BaseRequest, transport: asyncio.Transport) -> None:
        """Wait until the client has read enough; one that doesn't is disconnected."""
        try:
            async with asyncio.timeout(DRAIN_S):
                await request.writer.drain()
        except TimeoutError:
            transport.abort()
            raise ConnectionResetError("the client didn't read its answer") from None


DRAIN_S: Final = 60.0
