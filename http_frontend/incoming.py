"""A request with what the middlewares found out about it, and its body read within the limits."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from broker.errors import from_validation
from http_frontend.errors import HttpError

JSON_TYPES: Final = frozenset({"application/json"})
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Caller(msgspec.Struct, frozen=True):
    """Who asks: a key's owner, or the only tenant there is when no keys are configured."""

    name: str = ""
    tenant: str = ""
    priority: int = 5  # the best that its requests may have
    requests_per_minute: int = 0  # 0: no limit
    tokens_per_minute: int = 0


ANYBODY: Final = Caller()


class Incoming(web.BaseRequest):
    """aiohttp's request, with our fields. One is made for each request by the server's factory."""

    request_id: str
    traceparent: str
    caller: Caller
    model: str  # for log and metrics; "" until a route knows
    user: str  # what the body calls its end user, for the log
    outcome: str  # for the log: "" or why it ended otherwise than with its answer
    extra: bytes  # header lines for whatever answer it gets

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request_id = self.traceparent = self.model = self.user = self.outcome = ""
        self.caller = ANYBODY
        self.extra = b""

    @property
    def route(self) -> str:
        """The path without its query."""
        return self._message.url.raw_path

    async def body(self, most: int, timeout_s: float) -> bytes:
        """The whole body.

        Raises:
            HttpError: it isn't JSON (415), is compressed (415), larger than `most` (413), or hasn't
                arrived within `timeout_s` (408).
        """
        headers = self._message.headers
        kind = headers.get("Content-Type", "")
        if kind != "application/json" and kind.partition(";")[0].strip().lower() not in JSON_TYPES:
            raise HttpError(
                415, "unsupported_media_type", f"Content-Type must be application/json, not {kind[:80]!r}."
            )
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise HttpError(
                415, "unsupported_media_type", "Content-Encoding: compressed bodies aren't read here."
            )
        length = headers.get("Content-Length")
        if length is not None and int(length) > most:
            raise too_large(most)
        if "Expect" in headers and self.transport is not None:
            self.transport.write(CONTINUE)
        stream: StreamReader = self._payload
        if stream.is_eof():
            return stream.read_nowait()
        return await self._read_on(stream, most, timeout_s)

    async def _read_on(self, stream: StreamReader, most: int, timeout_s: float) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while part := await stream.readany():
                    size += len(part)
                    if size > most:
                        raise too_large(most)
                    parts.append(part)
        except TimeoutError:
            raise HttpError(
                408, "request_timeout", f"The body took more than {timeout_s:g} s.", close=True
            ) from None
        return b"".join(parts)


def too_large(most: int) -> HttpError:
    """The refusal of a body that is too large."""
    return HttpError(413, "body_too_large", f"The body may have at most {most} bytes.", close=True)


def make(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: Any,
    writer: Any,
    task: asyncio.Task[None],
) -> Incoming:
    """The request factory for aiohttp's server."""
    return Incoming(message, payload, protocol, writer, task, task.get_loop())


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode a body into its struct.

    Raises:
        InvalidRequest: names the field at fault.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise from_validation(problem) from None
