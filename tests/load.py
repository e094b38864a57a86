"""Sends requests open loop (at a rate) or closed loop (so many at once), and records their histories.

Bounded in count and time by its arguments; stops by itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from broker import protocol as p
from broker.calls import make_submit
from broker.client import AsyncClient
from broker.errors import LoadOnceError
from examples.scripted_worker import scripted
from tests.history import History


@dataclass(frozen=True)
class Ask:
    """One request to send, and what must come back."""

    prompt: str
    max_tokens: int
    seed: int
    stream: bool = True
    tenant: str = ""
    priority: int = 5
    expected: str | None = None
    cancel_after: int | None = None  # chunks


def scripted_mix(number: int, *, least: int = 5, most: int = 120) -> Ask:
    """The number-th request of a mixed load for scripted workers; the same each time."""
    choose = random.Random(number)
    prompt, tokens = f"request {number}", choose.randint(least, most)
    expected = "".join(scripted(prompt, number, tokens))
    return Ask(prompt, tokens, number, stream=choose.random() < 0.8, expected=expected)


class _Listener:
    """Passes a call's events to the history, and cancels where that is wanted."""

    def __init__(self, load: Load, id: str, ask: Ask) -> None:
        self._load = load
        self._id = id
        self._ask = ask
        self._chunks = 0
        self.ended = asyncio.get_running_loop().create_future()

    def on_chunk(self, chunk: p.Chunk) -> None:
        self._load.history.chunk(self._id, chunk)
        self._chunks += 1
        if self._chunks == self._ask.cancel_after:
            self._load.history.give_up(self._id)
            self._load.client.cancel(self._id)
            self._end()

    def on_done(self, done: p.Done, outcome: p.Outcome) -> None:
        self._load.history.done(self._id, done, outcome)
        self._end()

    def on_failed(self, problem: LoadOnceError) -> None:
        self._load.history.failed(self._id, problem.code)
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Load:
    """Requests over one client.

    Args:
        client: open in the running loop.
        history: gets every event.
        make: the number-th request.
        timeout_s: of each.
    """

    def __init__(
        self,
        client: AsyncClient,
        history: History,
        make: Callable[[int], Ask] = scripted_mix,
        timeout_s: float = 120.0,
    ) -> None:
        self.client = client
        self.history = history
        self._make = make
        self._timeout_s = timeout_s
        self._number = 0

    def send(self) -> asyncio.Future[None]:
        """Send the next request; the future is done when it has ended."""
        ask = self._make(self._number)
        request = p.Request(
            prompt=ask.prompt, params=p.Params(max_tokens=ask.max_tokens, seed=ask.seed, temperature=0)
        )
        id = f"{ask.tenant or 'load'}-{self._number}"
        self._number += 1
        submit = make_submit(request, id=id, stream=ask.stream, tenant=ask.tenant, priority=ask.priority)
        self.history.begin(id, ask.expected, streams=ask.stream)
        listener = _Listener(self, id, ask)
        self.client.submit(submit, request, listener, self._timeout_s)
        return listener.ended

    async def at_rate(self, per_s: float, seconds: float) -> None:
        """Send at a rate, whatever comes back; returns when all have ended."""
        ended = []
        begun = time.monotonic()
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(max(0.0, begun + number / per_s - time.monotonic()))
            ended.append(self.send())
        await asyncio.gather(*ended)

    async def at_once(self, many: int, total: int) -> None:
        """Keep so many in flight until `total` were sent; returns when all have ended."""
        left = total

        async def one() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self.send()

        await asyncio.gather(*(one() for _ in range(many)))
