"""A pool without sockets: what a frontend submits is written down, and the test says what comes back."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import msgspec

from broker.calls import Listener
from broker.errors import LoadOnceError
from broker.logs import Log
from broker.protocol import Chunk, Done, ModelInfo, Outcome, Request, Submit, Usage
from http_frontend.catalogue import Catalogue
from http_frontend.frontend import Frontend
from http_frontend.keys import Keys
from http_frontend.limits import Hosts, Origins, is_loopback
from http_frontend.settings import FrontendSettings
from http_frontend.tracing import AccessLog

MODEL = ModelInfo("m", context=2048, vocab=1000, aliases=["alias"], workers=1, created=1)
BASE = ModelInfo("base", context=64, vocab=1000, chat=False, workers=1)


class Submitted(msgspec.Struct):
    """One request that reached the pool."""

    submit: Submit
    request: Request
    listener: Any
    said: int = 0

    def say(self, text: str, **fields: Any) -> None:
        """A chunk of one token."""
        self.listener.on_chunk(Chunk(start=self.said, token_ids=[1], text=text, **fields))
        self.said += 1

    def end(self, reason: Any = "stop", tokens: int = 1) -> None:
        """The end."""
        self.listener.on_done(Done(self.submit.id, worker="w"), Outcome(reason, Usage(3, tokens)))

    def fail(self, problem: LoadOnceError) -> None:
        """The other end."""
        self.listener.on_failed(problem)


class FakePool:
    """Takes submits. `script` is called with each; the default answers at once with its prompt's text."""

    def __init__(self, script: Callable[[Submitted], None] | None = None) -> None:
        self.submitted: list[Submitted] = []
        self.cancelled: list[str] = []
        self.log = io.StringIO()
        self.access = io.StringIO()
        self.script = script if script is not None else echo

    def submit(self, submit: Submit, request: Request, listener: Listener, timeout_s: float) -> None:
        self.submitted.append(Submitted(submit, request, listener))
        self.script(self.submitted[-1])

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)


def echo(got: Submitted) -> None:
    """Answer with the last text that was asked."""
    request = got.request
    text = request.messages[-1].text if request.messages else request.prompt or str(request.token_ids)
    start = 0
    for word in text.split(" "):
        got.listener.on_chunk(Chunk(start=start, token_ids=[1], text=word + " "))
        start += 1
    got.end(tokens=start)


def make_frontend(pool: FakePool, keys: Keys | None = None, **settings: Any) -> Frontend:
    """A frontend on that pool, with two models."""
    chosen = FrontendSettings(**settings)
    log = Log("frontend", stream=pool.log)

    async def ask() -> list[ModelInfo]:
        return [MODEL, BASE]

    async def scrape() -> bytes:
        return frontend.metrics.text()

    catalogue = Catalogue(ask, lambda: 0.0, log)
    catalogue.heard([MODEL, BASE])
    frontend = Frontend(
        settings=chosen,
        log=log,
        access=AccessLog("frontend", "info", pool.access),
        pool=pool,
        catalogue=catalogue,
        keys=keys,
        hosts=Hosts(chosen.allowed_hosts, loopback=is_loopback(chosen.host)),
        origins=Origins(chosen.cors_origins),
    )
    frontend.scrape = scrape
    return frontend
