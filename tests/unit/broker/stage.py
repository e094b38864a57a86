"""A scheduler with everybody around it played by the test: clients and workers without sockets.

Time passes through `Stage.pass_time`, in steps short enough that the scheduler doesn't think it was paused.
After each event the scheduler's own integrity check runs.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from broker import protocol as p
from broker.admin_server import AdminServer
from broker.logs import Log
from broker.scheduler import TICK_S, Scheduler
from broker.settings import BrokerSettings
from tests.clock import Clock

HOST = "here"


def request(prompt: str = "hi") -> bytes:
    return p.encode(p.Request(prompt=prompt))


def chunk(start: int, count: int = 1) -> bytes:
    return p.encode(p.Chunk(start=start, token_ids=list(range(start, start + count)), text="x" * count))


def outcome(tokens: int = 1) -> bytes:
    return p.encode(p.Outcome(finish_reason="stop", usage=p.Usage(1, tokens)))


class Stage:
    """One broker's core, a clock, and what each peer was sent."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.log = io.StringIO()
        self.scheduler = Scheduler(
            BrokerSettings(**settings), "session-a", self.clock.now, Log("broker", stream=self.log)
        )
        self.admin = AdminServer(self.scheduler, self.clock.now, HOST, 1)
        self.clients: dict[bytes, list[tuple[p.BrokerToClient, list[bytes]]]] = defaultdict(list)
        self.workers: dict[bytes, list[tuple[p.BrokerToWorker, list[bytes]]]] = defaultdict(list)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, id: str, *chunks: bytes, client: bytes = b"c", body: bytes | None = None, **header: Any
    ) -> None:
        """A client submits, with the chunks that it has."""
        self.client(p.Submit(id=id, **header), [body if body is not None else request(id), *chunks], client)

    def client(self, message: p.ClientMessage, body: Sequence[bytes] = (), client: bytes = b"c") -> None:
        """A client says something."""
        self.scheduler.on_client(client, message, body, False, self.clock.now)
        self.settle()

    def heard(self, client: bytes = b"c") -> list[tuple[p.BrokerToClient, list[bytes]]]:
        """What a client was sent since it was last asked."""
        return self.clients.pop(client, [])

    def end_of(self, id: str, client: bytes = b"c") -> p.Done | p.Failed:
        """How a request of a client ended; it must have, exactly once, in what wasn't read yet."""
        heard = self.heard(client)
        ends = [m for m, _ in heard if isinstance(m, p.Done | p.Failed) and m.id == id]
        assert len(ends) == 1, f"{id} ended {len(ends)} times: {heard}"
        return ends[0]

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    def ready(self, name: str, *models: str, slots: int = 1, pid: int = 1, **more: Any) -> bytes:
        """A worker registers; returns its routing id, which is its name."""
        infos = [p.ModelInfo(m, 100, 100, aliases=[f"{m}-alias"]) for m in models or ("m",)]
        ready = p.Ready(
            name=name, device="cpu", host=HOST, pid=pid, slots=slots, models=infos, **more
        )  # fmt: skip
        self.worker(name.encode(), ready)
        return name.encode()

    def worker(self, worker: bytes, message: p.WorkerMessage, *body: bytes) -> None:
        """A worker says something."""
        self.scheduler.on_worker(worker, message, body, self.clock.now)
        self.settle()

    def told(self, worker: bytes) -> list[tuple[p.BrokerToWorker, list[bytes]]]:
        """What a worker was sent since it was last asked."""
        return self.workers.pop(worker, [])

    def work(self, worker: bytes) -> list[tuple[p.Work, list[bytes]]]:
        """The work a worker was given since it was last asked."""
        return [(m, body) for m, body in self.told(worker) if isinstance(m, p.Work)]

    def one_work(self, worker: bytes) -> str:
        """The name of the one attempt that a worker was given."""
        ((work, _),) = self.work(worker)
        return work.id

    def beat(self, worker: bytes, steps: int = 0) -> None:
        self.worker(worker, p.WorkerBeat(session="session-a", steps=steps))

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def pass_time(self, seconds: float, *beating: bytes) -> None:
        """Let time pass, tick by tick; the workers named go on beating, each with a step."""
        steps = 0
        while seconds > 0:
            self.clock.advance(min(seconds, TICK_S))
            seconds -= TICK_S
            steps += 1
            for worker in beating:
                self.beat(worker, steps)
            self.tick()

    def tick(self) -> None:
        self.scheduler.tick(self.clock.now)
        self.settle()

    def settle(self) -> None:
        """Deliver what the scheduler has to say."""
        self.scheduler.check()
        for side, identity, frames in self.scheduler.take():
            _, header, body = p.split(frames)
            if side == "client":
                self.clients[identity].append((p.decode_header(p.to_client, header), list(body)))
            else:
                self.workers[identity].append((p.decode_header(p.to_worker, header), list(body)))
        self.scheduler.check()
