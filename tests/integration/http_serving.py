"""A whole pool with frontends: real processes, real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
from openai import AsyncOpenAI

from tests.pool import Pool, running_pool, wait_for

KEY = "none-needed"


class HttpPool:
    """A pool and the address of its frontends."""

    def __init__(self, pool: Pool, port: int) -> None:
        self.pool = pool
        self.port = port

    @property
    def url(self) -> str:
        """Where the frontends listen."""
        return f"http://127.0.0.1:{self.port}"

    def frontend(self, *flags: str, name: str = "http") -> None:
        """Start a frontend and wait until it listens; what it has to say before that fails the test."""
        process = self.pool.start(name, "-m", "http_frontend", "--port", str(self.port), *flags)
        wait_for(
            lambda: '"listening"' in self.pool.log(name) or process.poll() is not None, f"frontend {name}"
        )
        assert process.poll() is None, self.pool.log(name)

    def wait_ready(self) -> None:
        """Wait until `/ready` says so."""
        wait_for(lambda: self.get("/ready")[0] == 200, "/ready")

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and text."""
        return self.ask(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and decoded JSON."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        status, text = self.ask(request)
        return status, json.loads(text)

    def ask(self, request: urllib.request.Request) -> tuple[int, str]:
        """Status and text, whatever the status."""
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as problem:
            with problem:
                return problem.code, problem.read().decode()

    def openai(self, **options: Any) -> openai.OpenAI:
        """OpenAI's own client; close it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, **options)

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """Its async twin; close it."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, **options)

    def running(self) -> int:
        """Requests that workers have in hand."""
        return sum(worker.in_hand for worker in self.pool.status().workers)


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def http_pool(*flags: str, worker: tuple[str, ...] = (), broker: tuple[str, ...] = ()) -> Iterator[HttpPool]:
    """A broker, a scripted worker and a frontend with these flags, ready to serve."""
    with running_pool() as pool:
        pool.broker(*broker)
        pool.scripted("gpu0", *worker)
        served = HttpPool(pool, free_port())
        served.frontend(*flags)
        served.wait_ready()
        yield served
