"""Which models there are, as the broker last said; asked for again each second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from broker.errors import LoadOnceError, ModelNotFound, Unavailable
from broker.logs import Log
from broker.protocol import ModelInfo

REFRESH_S: Final = 1.0
REST_S: Final = 0.1  # between two questions, however many want to know
ASK_AGAIN_S: Final = 1.0  # how long a request may wait for that
STALE_S: Final = 5.0  # a broker that has been silent for so long isn't there


class Catalogue:
    """The models by name and alias.

    Args:
        ask: asks the broker.
        clock: seconds, monotonic.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[Sequence[ModelInfo]]], clock: Callable[[], float], log: Log
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._log = log
        self._heard_at: float | None = None
        self._by_name: dict[str, ModelInfo] = {}
        self._unheard = False
        self._first = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None  # the question of those who can't be served
        self._asked = False  # whether it has gone out: what is said to it may be too old for who comes now
        self._asked_at: float | None = None  # when they asked last
        self.models: Sequence[ModelInfo] = ()

    async def wait_heard(self, patience_s: float) -> None:
        """Wait for the broker's first answer, but no longer than that."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._first.wait(), patience_s)

    @property
    def ready(self) -> list[str]:
        """Models that can be served now; none if the broker is silent."""
        if self._heard_at is None or self._clock() - self._heard_at > STALE_S:
            return []
        return [model.name for model in self.models if model.workers]

    def find(self, name: str | None) -> ModelInfo:
        """The model of that name; the first that was ever registered if it is empty.

        Raises:
            ModelNotFound: there is none of that name.
            Unavailable: no worker has registered at all yet.
        """
        if name:
            found = self._by_name.get(name)
            if found is not None:
                return found
            if self.models:
                known = ", ".join(model.name for model in self.models)
                raise ModelNotFound(f"The model {name[:128]!r} isn't served here: {known}.", param="model")
        elif self.models:
            return self.models[0]
        raise Unavailable("No worker has registered yet.", retry_after_ms=1000)

    async def look_up(self, name: str | None) -> ModelInfo:
        """As `find`, but the broker is asked anew before a refusal.

        A worker may have registered since, and another frontend on this port may have said so already.
        """
        try:
            return self.find(name)
        except (ModelNotFound, Unavailable):
            await self._ask_again()
            return self.find(name)

    async def _ask_again(self) -> None:
        """Hear what the broker says from now on, asking once for all who want to know.

        What was heard before the request came, be it a moment ago, doesn't do: the worker that it is for
        may have registered in between.
        """
        if self._asking is not None and not self._asking.done() and self._asked:
            await asyncio.shield(self._asking)
        if self._asking is None or self._asking.done():
            self._asked = False
            self._asking = asyncio.create_task(self._refresh())
        await asyncio.shield(self._asking)

    async def _refresh(self) -> None:
        if self._asked_at is not None:
            await asyncio.sleep(self._asked_at + REST_S - self._clock())
        self._asked, self._asked_at = True, self._clock()
        with contextlib.suppress(LoadOnceError, TimeoutError):  # `run` logs a broker that is silent
            self.heard(await asyncio.wait_for(self._ask(), ASK_AGAIN_S))

    def heard(self, models: Sequence[ModelInfo]) -> None:
        """Take in what the broker says."""
        self._heard_at = self._clock()
        self._first.set()
        self.models = models
        by_name = {alias: model for model in models for alias in model.aliases}
        self._by_name = by_name | {model.name: model for model in models}

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            try:
                self.heard(await self._ask())
                if self._unheard:
                    self._unheard = False
                    self._log.info("the broker answers again")
            except (LoadOnceError, TimeoutError) as problem:
                if not self._unheard:
                    self._unheard = True
                    self._log.warning("the broker doesn't answer", problem=str(problem))
            await asyncio.sleep(REFRESH_S)
