"""What comes over a socket that isn't a well-meant request: right code, health still quick."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from tests.unit.http_frontend.serving import CHAT, Served, serving, user

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(max_body_bytes=1_500_000, idle_timeout_s=0.6, body_timeout_s=0.3) as one:
        yield one


@asynccontextmanager
async def connection(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_to(served: Served, raw: bytes) -> tuple[int, Any]:
    """Send bytes, read until the server closes or has answered; status and JSON."""
    async with connection(served) as (reader, writer):
        writer.write(raw)
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
        return int(head.split()[1]), json.loads(body)


async def assert_health_is_quick(served: Served) -> None:
    began = time.perf_counter()
    assert (await served.get("/health"))[0] == 200
    assert time.perf_counter() - began < 0.1


def prompt_of(size: int) -> bytes:
    """A valid chat body of exactly so many bytes."""
    empty = json.dumps({"messages": [user("")]}).encode()
    return json.dumps({"messages": [user("x" * (size - len(empty)))]}).encode()


async def test_c23_a_body_under_the_limit_is_served(served: Served) -> None:
    status, _, _ = await served.post(
        CHAT, prompt_of(1_200_000), headers={"Content-Type": "application/json", "Expect": "100-continue"}
    )
    assert status == 200


async def test_c23_a_body_over_the_limit_is_413_with_a_content_length(served: Served) -> None:
    status, answer, headers = await served.post(
        CHAT, prompt_of(1_500_001), headers={"Content-Type": "application/json"}
    )
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert headers["Connection"] == "close"
    status, _, _ = await served.post(CHAT, prompt_of(1_500_000), headers={"Content-Type": "application/json"})
    assert status == 200


async def test_c23_a_huge_content_length_is_refused_before_a_byte_is_read(served: Served) -> None:
    status, answer = await answer_to(served, POST + b"Content-Length: 100000000000\r\n\r\n{")
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_c23_a_chunked_body_over_the_limit_is_413(served: Served) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(16):
            yield b"x" * 100_000

    async with served.http.post(CHAT, data=chunks(), headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 413
        assert (await answer.json())["error"]["code"] == "body_too_large"
    await assert_health_is_quick(served)


async def test_a_chunked_body_under_the_limit_is_served(served: Served) -> None:
    body = prompt_of(300_000)

    async def chunks() -> AsyncIterator[bytes]:
        for place in range(0, len(body), 7000):
            yield body[place : place + 7000]

    async with served.http.post(CHAT, data=chunks(), headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 200


async def test_a_compressed_body_is_refused(served: Served) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    status, answer, _ = await served.post(CHAT, b"\x1f\x8b" + b"\0" * 100, headers=headers)
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_slow_upload_is_408(served: Served) -> None:
    status, answer = await answer_to(served, POST + b"Content-Length: 100\r\n\r\n{")
    assert (status, answer["error"]["code"]) == (408, "request_timeout")


async def test_a_connection_without_a_whole_header_is_closed(served: Served) -> None:
    for raw in (b"", b"POST /v1/chat", POST):
        async with connection(served) as (reader, writer):
            writer.write(raw)
            async with asyncio.timeout(5):
                assert await reader.read() == b""


async def test_a_header_that_trickles_is_closed(served: Served) -> None:
    async with connection(served) as (reader, writer):
        writer.write(POST)

        async def trickle() -> None:
            while True:
                writer.write(b"X-A: b\r\n")
                await asyncio.sleep(0.05)

        drops = asyncio.ensure_future(trickle())
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        drops.cancel()


FLOODS = [
    POST + b"X-Big: " + b"a" * 20_000 + b"\r\n\r\n",
    POST + b"".join(b"X-%d: a\r\n" % i for i in range(500)) + b"\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


@pytest.mark.parametrize("raw", FLOODS, ids=["one long", "many", "long path"])
async def test_a_flood_of_headers_is_431(served: Served, raw: bytes) -> None:
    status, answer = await answer_to(served, raw)
    assert (status, answer["error"]["code"]) == (431, "header_too_large")
    await assert_health_is_quick(served)


NOT_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"hello\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x00" * 100 + b"\r\n\r\n",
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
]


@pytest.mark.parametrize("raw", NOT_HTTP, ids=range(len(NOT_HTTP)))
async def test_what_isnt_http_gets_a_json_400(served: Served, raw: bytes) -> None:
    status, answer = await answer_to(served, raw)
    assert (status, answer["error"]["code"]) == (400, "bad_http")
    assert not served.pool.submitted
    await assert_health_is_quick(served)


async def test_a_broken_chunked_body_is_400(served: Served) -> None:
    status, _ = await answer_to(served, POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
    assert status == 400


async def test_health_is_quick_beside_idle_connections() -> None:
    async with serving() as served:
        held = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(300)]
        for _, writer in held[::2]:
            writer.write(b"POST /v1/chat/comp")
        await assert_health_is_quick(served)
        for _, writer in held:
            writer.close()


async def test_a_pipelined_request_is_answered_in_its_turn(served: Served) -> None:
    async with connection(served) as (reader, writer):
        body = json.dumps({"messages": [user("x")]}).encode()
        one = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        writer.write(one + one + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(5):
            everything = await reader.read()
        assert everything.count(b"HTTP/1.1 200 OK") == 3
