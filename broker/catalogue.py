"""Which models there are and who serves them. Knows nothing of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from broker.metrics import Rate
from broker.protocol import ModelInfo
from broker.workers import Worker, WorkerState

LOBBY: Final = ""  # no model's name: where requests wait whose model nobody serves yet


@dataclass(slots=True)
class Served:
    """A model that some worker has served since the broker started."""

    info: ModelInfo
    workers: dict[bytes, Worker] = field(default_factory=dict)
    alone_since: float = 0.0  # when the last worker left
    rate: Rate = field(default_factory=Rate)  # requests that end, per second

    @property
    def ready(self) -> int:
        """Workers that take work now."""
        return sum(worker.state is WorkerState.READY for worker in self.workers.values())


class Catalogue:
    """Every model ever served, the first registered first; that one is the default."""

    def __init__(self) -> None:
        self.models: dict[str, Served] = {}
        self._aliases: dict[str, str] = {}

    def resolve(self, name: str) -> str | None:
        """The model's own name behind a name or an alias; "" is the default. None: nobody has served it."""
        if not name:
            return next(iter(self.models), None)
        return name if name in self.models else self._aliases.get(name)

    def workers_of(self, name: str) -> dict[bytes, Worker]:
        """The workers registered for a model, by their routing ids."""
        served = self.models.get(name)
        return served.workers if served is not None else {}

    def enter(self, worker: Worker) -> None:
        """A worker serves its models from now on. An alias belongs to the model that named it last."""
        for info in worker.ready.models:
            served = self.models.get(info.name)
            if served is None:
                served = self.models[info.name] = Served(info)
            served.info = info
            served.workers[worker.identity] = worker
            for alias in info.aliases:
                self._aliases[alias] = info.name

    def leave(self, worker: Worker, now: float) -> None:
        """A worker serves nothing any more."""
        for name in worker.models:
            served = self.models[name]
            del served.workers[worker.identity]
            if not served.workers:
                served.alone_since = now

    def count_end(self, name: str) -> None:
        """A request for a model has ended."""
        served = self.models.get(name)
        if served is not None:
            served.rate.count()

    def tick(self, now: float) -> None:
        """Let time pass for the rates."""
        for served in self.models.values():
            served.rate.tick(now)

    def infos(self) -> list[ModelInfo]:
        """What a client is told: each model with its workers that are ready now."""
        return [msgspec.structs.replace(served.info, workers=served.ready) for served in self.models.values()]
