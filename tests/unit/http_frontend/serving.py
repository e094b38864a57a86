"""A frontend on a port of its own, over a `FakePool`, in the test's own event loop."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from http_frontend.frontend import Frontend
from http_frontend.keys import Keys
from http_frontend.server import Server, bind
from tests.unit.http_frontend.fake_pool import FakePool, make_frontend

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Served:
    """The frontend, its pool and a client of it."""

    def __init__(self, frontend: Frontend, pool: FakePool, port: int, http: aiohttp.ClientSession) -> None:
        self.frontend, self.pool, self.port, self.http = frontend, pool, port, http

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, Any]:
        """Status, decoded JSON and headers; `body` is JSON or raw bytes."""
        sent = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(path, **sent, **options) as answer:
            text = await answer.text()
            assert answer.content_type == "application/json", text
            return answer.status, json.loads(text), answer.headers

    async def get(self, path: str, **options: Any) -> tuple[int, str, Any]:
        """Status, text and headers."""
        async with self.http.get(path, **options) as answer:
            return answer.status, await answer.text(), answer.headers

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        """Status and answer of a chat request."""
        status, answer, _ = await self.post(CHAT, {"messages": [user("hi")], **fields})
        return status, answer

    async def events(self, path: str, **fields: Any) -> list[Any]:
        """The events of a stream, checked to be well-formed; the last is ``[DONE]`` if all went well."""
        body = {"stream": True, **fields}
        if path == CHAT:
            body.setdefault("messages", [user("hi")])
        async with self.http.post(path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return parse_events(await answer.read())


def user(text: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def parse_events(raw: bytes) -> list[Any]:
    """Read a stream as the strictest reader would: every event one line of data, one JSON object."""
    assert raw.endswith(b"\n\n")
    found = list[Any]()
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        assert len(block.splitlines()) == 1, block  # str.splitlines cuts at U+2028 and its like as well
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
        if data != "[DONE]":
            assert isinstance(found[-1], dict)
    return found


@asynccontextmanager
async def serving(
    pool: FakePool | None = None, *, keys: Keys | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Serve until the block ends."""
    pool = pool if pool is not None else FakePool()
    frontend = make_frontend(pool, keys, **settings)
    server = Server(frontend)
    sock = bind("127.0.0.1", 0, reuse_port=False)
    await server.start(sock)
    port = sock.getsockname()[1]
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            yield Served(frontend, pool, port, http)
    finally:
        await server.drain(0.2)
