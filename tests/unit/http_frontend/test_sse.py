"""Events on a connection that is only pretended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.http import HttpVersion10, HttpVersion11

from broker.errors import Unavailable
from http_frontend.sse import EventStream, SlowReader, event


class FakeTransport:
    """Keeps what is written; while it is `stuck`, nobody reads what comes after the first `read` bytes."""

    def __init__(self) -> None:
        self.sent = b""
        self.stuck = False
        self.read = 0
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return len(self.sent) - self.read if self.stuck else 0

    def abort(self) -> None:
        self.aborted = True


def open_stream(transport: FakeTransport, version: Any = HttpVersion11, **options: Any) -> EventStream:
    request: Any = SimpleNamespace(transport=transport, version=version, keep_alive=True)
    chosen = {"buffer_bytes": 1000, "heartbeat_s": 60.0, "extra": b"X-A: b\r\n", **options}
    return EventStream(request, **chosen)


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_line_ends_that_json_allows_are_escaped(end: str) -> None:
    made = event(f'"a{end}b"'.encode())
    assert len(made.decode().rstrip("\n").splitlines()) == 1


async def test_a_stream_is_headers_events_done_and_the_end_of_the_body() -> None:
    transport = FakeTransport()
    stream = open_stream(transport)
    stream.send(event(b"{}"))
    stream.end()
    head, _, body = transport.sent.partition(b"\r\n\r\n")
    assert b"X-A: b" in head
    assert b"Transfer-Encoding: chunked" in head
    assert body == b"a\r\ndata: {}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    before = transport.sent
    stream.send(event(b"{}"))
    stream.end()
    stream.fail(Unavailable("x"))
    assert transport.sent == before  # nothing comes after the end


async def test_before_http_1_1_the_connections_end_is_the_bodys() -> None:
    transport = FakeTransport()
    stream = open_stream(transport, HttpVersion10)
    stream.end()
    assert b"chunked" not in transport.sent
    assert b"Connection: close" in transport.sent
    assert not stream.keep_alive


async def test_an_event_larger_than_the_bound_is_not_held_against_its_reader() -> None:
    """Such as an echoed prompt: nobody can have read what was only just written."""
    transport = FakeTransport()
    transport.stuck = True
    stream = open_stream(transport)
    stream.send(event(b"x" * 5000))
    stream.send(event(b"y" * 5000))  # of the second choice
    stream.send(event(b"{}"))
    assert not stream.closed and not transport.aborted
    with pytest.raises(SlowReader):
        for _ in range(100):
            stream.send(event(b"z" * 100))
    assert transport.aborted
    assert len(transport.sent) < 5000 + 5000 + 1000 + 1000


async def test_echoed_prompts_are_not_held_against_their_reader_whatever_their_sizes() -> None:
    transport = FakeTransport()
    transport.stuck = True
    stream = open_stream(transport)
    for size in (400, 900, 985, 990, 2000, 10, 700):
        stream.send(event(b"x" * size), echoed=True)
        stream.send(event(b"{}"))
    assert not stream.closed and not transport.aborted


async def test_what_was_allowed_for_large_events_is_taken_back_when_they_have_been_read() -> None:
    transport = FakeTransport()
    transport.stuck = True
    stream = open_stream(transport)
    for _ in range(5):
        stream.send(event(b"x" * 5000))
        transport.read = len(transport.sent)
    with pytest.raises(SlowReader):
        for _ in range(100):
            stream.send(event(b"z" * 100))
    assert len(transport.sent) - transport.read < 1000 + 200


@pytest.mark.parametrize("echoed", [False, True])
async def test_a_slow_reader_of_large_events_is_dropped_as_well(echoed: bool) -> None:
    transport = FakeTransport()
    transport.stuck = True
    stream = open_stream(transport)
    with pytest.raises(SlowReader):
        for _ in range(1000):
            stream.send(event(b"x" * 5000), echoed=echoed)
    assert transport.aborted
    assert len(transport.sent) < 64 * 1000 + 2 * 5000


async def test_one_event_of_any_size_fits() -> None:
    transport = FakeTransport()
    transport.stuck = True
    stream = open_stream(transport)
    stream.send(b": unread\n\n" * 60)
    stream.send(event(b"x" * 200_000))
    stream.send(event(b"{}"))
    stream.end()
    assert not transport.aborted


async def test_an_error_that_no_longer_fits_cuts_the_stream_and_raises_nothing() -> None:
    transport = FakeTransport()
    transport.stuck = True
    stream = open_stream(transport)
    stream.send(b"x" * (1000 - len(transport.sent) - 10))
    stream.fail(Unavailable("x"))
    assert stream.closed and transport.aborted


async def test_a_reader_past_the_bound_is_cut_off() -> None:
    transport = FakeTransport()
    stream = open_stream(transport)
    transport.stuck = True
    with pytest.raises(SlowReader):
        for _ in range(3):
            stream.send(b"x" * 500)
    assert transport.aborted
    assert stream.closed


async def test_silence_is_broken_by_comments_and_talk_is_not() -> None:
    transport = FakeTransport()
    stream = open_stream(transport, heartbeat_s=0.05)
    async with asyncio.timeout(5):
        while transport.sent.count(b": still here") < 2:
            await asyncio.sleep(0.01)
    stream.drop()
    count = transport.sent.count(b": still here")
    await asyncio.sleep(0.12)
    assert transport.sent.count(b": still here") == count


async def test_a_client_that_has_gone_is_told_by_an_error() -> None:
    request: Any = SimpleNamespace(transport=None, version=HttpVersion11, keep_alive=True)
    with pytest.raises(ConnectionResetError):
        EventStream(request, buffer_bytes=1, heartbeat_s=1.0, extra=b"")
