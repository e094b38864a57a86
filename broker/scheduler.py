"""The broker's pure core: events and the time go in, messages to send come out.

The only place where a request changes its state. No socket, thread, clock or randomness in here; bodies
are bytes that are kept and passed on, never decoded. The caller calls one ``on_…`` method for each event,
`tick` a few times a second, and sends what `take` returns, in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from broker import protocol as p
from broker.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LoadOnceError,
    ModelNotFound,
    NotFound,
    Overloaded,
    ProtocolError,
    RequestFailed,
    Unavailable,
    VersionMismatch,
)
from broker.inflight import Job, Key, State
from broker.logs import Log
from broker.metrics import Metrics, Rate
from broker.settings import BrokerSettings
from broker.waiting import Fairness, Waiting
from broker.workers import Worker, WorkerState, choose

TICK_S: Final = 0.25  # how often `tick` is due
GAP_S: Final = 1.5  # a longer silence of our own means that we were paused, not the others
MIN_RETRY_MS, MAX_RETRY_MS = 100, 60_000
MIB: Final = 1024 * 1024

Outgoing = tuple[Literal["client", "worker"], bytes, list[bytes]]  # side, routing id, frames


@dataclass(slots=True)
class Client:
    """A client with requests in flight."""

    heard: float
    pings: bool = False  # it has pinged once, so it must go on
    jobs: dict[str, Job] = field(default_factory=dict)  # by its own id


@dataclass(slots=True)
class Served:
    """A model that some worker has served since the broker started."""

    info: p.ModelInfo
    workers: dict[bytes, Worker] = field(default_factory=dict)
    alone_since: float = 0.0  # when the last worker left
    rate: Rate = field(default_factory=Rate)  # requests that end, per second


class Scheduler:
    """Queue + workers + in flight → messages to send.

    Args:
        settings: bounds and times.
        session: names this life of the broker; peers that know another one start over.
        now: monotonic seconds, as in all methods.
        log: for events that an operator wants to see.
    """

    def __init__(self, settings: BrokerSettings, session: str, now: float, log: Log) -> None:
        self.settings = settings
        self.session = session
        self.metrics = Metrics()
        self.workers: dict[bytes, Worker] = {}
        self.clients: dict[bytes, Client] = {}
        self.models: dict[str, Served] = {}
        self.queues: dict[str, Waiting] = {}
        self._aliases: dict[str, str] = {}
        self._fairness = Fairness()
        self._deadlines: list[tuple[float, int, Key]] = []
        self._in_flight = 0
        self._number = 0
        self._started = now
        self._ticked = now
        self._beat_sent = now
        self._log = log
        self._out: list[Outgoing] = []

    # ── what the caller sends ────────────────────────────────────────────────────────────────────

    def take(self) -> list[Outgoing]:
        """Messages to send, in order; the caller owns them now."""
        out, self._out = self._out, []
        return out

    # ── events from clients ──────────────────────────────────────────────────────────────────────

    def on_client(
        self, identity: bytes, message: p.ClientMessage, body: Sequence[bytes], delimited: bool, now: float
    ) -> None:
        """A decoded message of a client."""
        client = self.clients.get(identity)
        if client is not None:
            client.heard = now
        if isinstance(message, p.Submit):
            self._on_submit(identity, message, body, delimited, now)
        elif isinstance(message, p.Cancel):
            job = client.jobs.get(message.id) if client else None
            if job is not None:
                self._fail(job, Cancelled("The request was cancelled by its client."), now)
        elif isinstance(message, p.Ping):
            self._on_ping(identity, message, delimited, now)
        else:
            self._on_list_models(identity, message, delimited)

    def on_malformed(self, side: Literal["client", "worker"], identity: bytes, problem: ProtocolError,
                     delimited: bool = False) -> None:  # fmt: skip
        """A message that can't be decoded: counted, and a client is told."""
        self.metrics.malformed += 1
        if side == "client":
            self._tell(identity, p.Failed.of(problem), [], delimited)

    def _on_submit(
        self, identity: bytes, submit: p.Submit, body: Sequence[bytes], delimited: bool, now: float
    ) -> None:
        self.metrics.submitted += 1
        try:
            if submit.version != p.VERSION:
                raise VersionMismatch(f"version: this broker speaks {p.VERSION}, not {submit.version}")
            if not body:
                raise InvalidRequest("a submit needs a request as its first body frame", param="request")
            client = self.clients.get(identity)
            again = client.jobs.get(submit.id) if client else None
            if again is not None:
                self._drop(again, now)  # the client has started over with what it knows
            job = self._admit(identity, submit, body, delimited, now)
        except LoadOnceError as problem:
            self.metrics.failed[problem.code] += 1
            self._tell(identity, p.Failed.of(problem, submit.id), [], delimited)
            return
        self._keep(job, now)
        self._dispatch(job.model, now)

    def _admit(
        self, identity: bytes, submit: p.Submit, body: Sequence[bytes], delimited: bool, now: float
    ) -> Job:
        """Build the request's job, or raise the error that refuses it."""
        model = self._resolve(submit.model, now)
        client = self.clients.get(identity)
        if client is not None and len(client.jobs) >= self.settings.client_limit:
            raise Overloaded(
                f"one client may have {self.settings.client_limit} requests in flight",
                retry_after_ms=MIN_RETRY_MS,
            )
        seconds = submit.deadline_ms / 1000 if submit.deadline_ms else self.settings.default_deadline_s
        self._number += 1
        job = Job(
            key=(identity, submit.id), number=self._number, submit=submit, model=model, request=body[0],
            chunks=list(body[1:]), arrived=now, deadline=now + seconds, delimited=delimited,
        )  # fmt: skip
        self._check_room(job)
        return job

    def _check_room(self, job: Job) -> None:
        """Refuse what would grow a queue past its bounds. What was begun before gets in: it was accepted."""
        queue = self.queues.get(job.model)
        if queue is None or job.begun:
            return
        full = len(queue) >= self.settings.queue_limit
        if not full and queue.bytes + job.size <= self.settings.queue_mib * MIB:
            return
        served = self.models.get(job.model)
        hint = self._retry_hint(job.model)
        if served is None or not served.workers:
            raise Unavailable(f"no worker serves {job.model!r} and its queue is full", retry_after_ms=hint)
        bound = f"{self.settings.queue_limit} requests" if full else f"{self.settings.queue_mib} MiB"
        raise Overloaded(f"the queue of {job.model!r} is full ({bound})", retry_after_ms=hint)

    def _resolve(self, name: str, now: float) -> str:
        """The model's own name. While workers may still be starting, an unknown name may wait."""
        if not name and self.models:
            return next(iter(self.models))
        known = name if name in self.models else self._aliases.get(name)
        if known is not None:
            return known
        if now - self._started < self.settings.no_worker_wait_s or not self.models:
            return name
        raise ModelNotFound(f"model: nobody serves {name!r}", param="model")

    def _retry_hint(self, model: str) -> int:
        """Milliseconds until the queue may have room, from the rate at which requests end."""
        served = self.models.get(model)
        if served is None or not served.workers or served.rate.per_second <= 0:
            return 1000
        waiting = len(self.queues.get(model, ()))
        due = int(1000 * waiting / served.rate.per_second / 10)  # a tenth of it: room, not emptiness
        return min(max(due, MIN_RETRY_MS), MAX_RETRY_MS)

    def _keep(self, job: Job, now: float) -> None:
        client = self.clients.setdefault(job.client, Client(heard=now))
        client.jobs[job.submit.id] = job
        self._in_flight += 1
        self._fairness.enter(job.submit.tenant)
        heapq.heappush(self._deadlines, (job.deadline, job.number, job.key))
        self._enqueue(job)

    def _queue(self, model: str) -> Waiting:
        queue = self.queues.get(model)
        if queue is None:
            queue = self.queues[model] = Waiting(self._fairness)
        return queue

    def _on_ping(self, identity: bytes, ping: p.Ping, delimited: bool, now: float) -> None:
        client = self.clients.get(identity)
        mine: dict[str, Job] = client.jobs if client else {}
        if client is not None:
            client.pings = True
        unknown = [id for id in ping.pending if id not in mine]
        pong = p.Pong(session=self.session, unknown=unknown, stamp=ping.stamp)
        self._tell(identity, pong, [], delimited)

    def _on_list_models(self, identity: bytes, message: p.ListModels, delimited: bool) -> None:
        if message.version != p.VERSION:
            wrong = VersionMismatch(f"version: this broker speaks {p.VERSION}, not {message.version}")
            self._tell(identity, p.Failed.of(wrong), [], delimited)
            return
        self._tell(identity, p.Models(models=self.model_infos(), session=self.session), [], delimited)

    def model_infos(self) -> list[p.ModelInfo]:
        """Every model ever served, first registered first, with its workers that are ready now."""
        return [
            msgspec.structs.replace(served.info, workers=self.ready_workers(served))
            for served in self.models.values()
        ]

    @staticmethod
    def ready_workers(served: Served) -> int:
        """Workers of a model that take work now."""
        return sum(worker.state is WorkerState.READY for worker in served.workers.values())

    # ── events from workers ──────────────────────────────────────────────────────────────────────

    def on_worker(self, identity: bytes, message: p.WorkerMessage, body: Sequence[bytes], now: float) -> None:
        """A decoded message of a worker."""
        if isinstance(message, p.Ready):
            self._on_ready(identity, message, now)
            return
        worker = self.workers.get(identity)
        if worker is None:
            self._on_stranger(identity, message)
            return
        worker.heard = now
        match message:
            case p.Chunks():
                self._on_chunks(worker, message, body)
            case p.Done():
                self._on_done(worker, message, body, now)
            case p.Failed():
                self._on_failed(worker, message, now)
            case p.WorkerBeat():
                self._on_beat(worker, message, now)
            case p.HandOff():
                self._on_handoff(worker, message, now)
            case p.Leave():
                self._lose(worker, "it left", now, blame=False)

    def _on_stranger(self, identity: bytes, message: p.WorkerMessage) -> None:
        """A worker that isn't registered (we restarted, or took it for dead): it learns our session."""
        if isinstance(message, p.Chunks | p.Done | p.Failed):
            self.metrics.stray += 1
        if isinstance(message, p.WorkerBeat):
            # Its own session is the same as ours if we gave it up: an error makes it register again.
            self._say(identity, p.BrokerBeat(session=self.session))
            self._say(identity, p.Failed.of(NotFound("you are not registered: send ready again")))

    def _on_ready(self, identity: bytes, ready: p.Ready, now: float) -> None:
        known = self.workers.get(identity)
        if known is not None:
            self._lose(known, "it registered again", now, blame=False)
        refusal = self._refusal(ready)
        if refusal is not None:
            self._log.warning("worker_refused", worker=ready.name, pid=ready.pid, reason=refusal.message)
            self._say(identity, p.Failed.of(refusal))
            return
        worker = self.workers[identity] = Worker(identity, ready, now)
        self._log.info(
            "worker_ready", worker=ready.name, device=ready.device, host=ready.host, pid=ready.pid,
            models=worker.models, slots=ready.slots,
        )  # fmt: skip
        for info in ready.models:
            self._serve(info, worker, now)
        self._say(identity, p.BrokerBeat(session=self.session))
        for name in list(self.queues):
            self._dispatch(name, now)

    def _refusal(self, ready: p.Ready) -> LoadOnceError | None:
        """Why a worker isn't wanted, or None."""
        if ready.version != p.VERSION:
            return VersionMismatch(f"version: this broker speaks {p.VERSION}, not {ready.version}")
        for other in self.workers.values():
            who = f"worker {other.name} (pid {other.ready.pid} on {other.ready.host})"
            if other.name == ready.name:
                return Unavailable(f"name: {who} is alive and has this name", param="name")
            one_device = (other.ready.host, other.ready.device_uuid) == (ready.host, ready.device_uuid)
            allowed = ready.shared_device and other.ready.shared_device
            if ready.device_uuid and one_device and not allowed:
                return Unavailable(f"device: {who} is alive and has {ready.device}", param="device")
        return None

    def _serve(self, info: p.ModelInfo, worker: Worker, now: float) -> None:
        served = self.models.get(info.name)
        if served is None:
            served = self.models[info.name] = Served(info)
        served.info = info
        served.workers[worker.identity] = worker
        for alias in info.aliases:
            self._aliases[alias] = info.name
        default = next(iter(self.models))
        for name in [n for n in ("", *info.aliases) if n in self.queues]:
            for job in self.queues.pop(name).jobs():
                job.model = default if not name else info.name
                self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        queue = self._queue(job.model)
        if job.begun:
            queue.add_begun([job])
        else:
            queue.add(job)

    def _on_beat(self, worker: Worker, beat: p.WorkerBeat, now: float) -> None:
        worker.note_beat(beat, now)
        if worker.jobs and now - worker.stepped >= self.settings.stall_s:
            self._say(worker.identity, p.Drain(grace_ms=0))
            self._lose(worker, f"no step in {self.settings.stall_s:g} s with work in hand", now)

    def _on_chunks(self, worker: Worker, message: p.Chunks, body: Sequence[bytes]) -> None:
        """File one step's output and regroup it: one message for each client that streams."""
        grouped: dict[bytes, tuple[list[str], list[bytes], bool]] = {}
        tokens = message.tokens if len(message.tokens) == len(message.ids) else [0] * len(message.ids)
        for id, frame, count in zip(message.ids, body, tokens, strict=False):
            job = worker.jobs.get(id)
            if job is None:
                self.metrics.stray += 1
                continue
            job.chunks.append(frame)
            job.tokens += count
            worker.tokens += count
            self.metrics.tokens += count
            if job.suspect:
                job.deaths = 0
                worker.suspects.discard(id)
            if job.submit.stream:
                group = grouped.setdefault(job.client, ([], [], job.delimited))
                group[0].append(job.submit.id)
                group[1].append(frame)
        for identity, (ids, frames, delimited) in grouped.items():
            self._tell(identity, p.Chunks(ids=ids), frames, delimited)

    def _on_done(self, worker: Worker, message: p.Done, body: Sequence[bytes], now: float) -> None:
        job = worker.jobs.get(message.id)
        if job is None or not body:
            self.metrics.stray += 1
            return
        self.metrics.done += 1
        started = job.first_started if job.first_started is not None else now
        done = p.Done(
            id=job.submit.id, worker=worker.name, attempts=job.dispatches,
            queued_ms=int(1000 * (started - job.arrived)),
        )  # fmt: skip
        frames = [body[0]] if job.submit.stream else [body[0], *job.chunks]
        self._end(job, now)
        self._tell(job.client, done, frames, job.delimited)
        self._dispatch_for(worker, now)

    def _on_failed(self, worker: Worker, message: p.Failed, now: float) -> None:
        job = worker.jobs.get(message.id)
        if job is None:
            self.metrics.stray += 1
            return
        self._fail(job, message.exception(), now)

    def _on_handoff(self, worker: Worker, message: p.HandOff, now: float) -> None:
        jobs = [worker.jobs[id] for id in message.ids if id in worker.jobs]
        self.metrics.handoffs += len(jobs)
        if worker.state is WorkerState.READY:
            worker.move(WorkerState.DRAINING)  # it hands back because it goes; never give it the same again
        self._take_back(jobs, now)

    # ── events from admins and from the shell ────────────────────────────────────────────────────

    def on_gone(self, pid: int, name: str, now: float) -> bool:
        """A process exited: its worker, if it is one, is gone at once. Returns whether there was one."""
        found = [w for w in self.workers.values() if w.ready.pid == pid and name in ("", w.name)]
        for worker in found:
            self._lose(worker, "its process exited", now)
        return bool(found)

    def on_drain(self, name: str, grace_ms: int, leave: bool) -> None:
        """Give a worker no new work; with `leave` it is told to go after its grace.

        Raises:
            NotFound: no worker has this name.
        """
        worker = self._named(name)
        if worker.state is WorkerState.READY:
            worker.move(WorkerState.DRAINING)
        if leave:
            self._say(worker.identity, p.Drain(grace_ms=grace_ms))

    def on_resume(self, name: str, now: float) -> None:
        """Give a drained worker work again.

        Raises:
            NotFound: no worker has this name.
        """
        worker = self._named(name)
        if worker.state is WorkerState.DRAINING:
            worker.move(WorkerState.READY)
        self._dispatch_for(worker, now)

    def on_admin_cancel(self, id: str, now: float) -> int:
        """Cancel the requests that clients call `id`; returns how many.

        Raises:
            NotFound: nobody has such a request in flight.
        """
        jobs = [c.jobs[id] for c in self.clients.values() if id in c.jobs]
        if not jobs:
            raise NotFound(f"id: no request {id!r} is in flight", param="id")
        for job in jobs:
            self._fail(job, Cancelled("The request was cancelled by an operator."), now)
        return len(jobs)

    def on_client_gone(self, identity: bytes, reason: str, now: float) -> None:
        """A client can't be reached: what it waited for is dropped."""
        client = self.clients.get(identity)
        if client is None:
            return
        self._log.info("client_gone", client=identity.hex(), requests=len(client.jobs), reason=reason)
        for job in list(client.jobs.values()):
            self.metrics.failed["client_gone"] += 1
            self._drop(job, now)

    def on_worker_unroutable(self, identity: bytes, now: float) -> None:
        """A message could not be handed to a worker: it is gone."""
        worker = self.workers.get(identity)
        if worker is not None:
            self._lose(worker, "it can't be reached", now)

    def _named(self, name: str) -> Worker:
        for worker in self.workers.values():
            if worker.name == name:
                return worker
        raise NotFound(f"worker: there is no {name!r}", param="worker")

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> None:
        """Let time pass: beats, deadlines, peers that fell silent. Due each `TICK_S` seconds."""
        gap = now - self._ticked
        self._ticked = now
        if gap > GAP_S:
            self._forgive(gap)
        self._beat(now)
        self._expire(now)
        for worker in [w for w in self.workers.values() if now - w.heard > p.LIVENESS_S]:
            self._lose(worker, f"silent for {p.LIVENESS_S:g} s", now)
        silent = [i for i, c in self.clients.items() if c.pings and now - c.heard > p.LIVENESS_S]
        for identity in silent:
            self.on_client_gone(identity, f"silent for {p.LIVENESS_S:g} s", now)
        for served in self.models.values():
            served.rate.tick(now)
        self._expire_workerless(now)

    def _forgive(self, gap: float) -> None:
        """We were paused: what peers sent meanwhile is still to be read, so nobody was silent."""
        self._log.warning("broker_paused", seconds=round(gap, 3))
        for worker in self.workers.values():
            worker.heard += gap
            worker.stepped += gap
        for client in self.clients.values():
            client.heard += gap

    def _beat(self, now: float) -> None:
        if now - self._beat_sent < p.BEAT_INTERVAL_S:
            return
        self._beat_sent = now
        for worker in self.workers.values():
            self._say(worker.identity, p.BrokerBeat(session=self.session))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, key = heapq.heappop(self._deadlines)
            job = self._find(key)
            if job is not None and job.number == number:
                seconds = job.deadline - job.arrived
                where = "while it waited" if job.state is State.QUEUED else "while it ran"
                self._fail(job, DeadlineExceeded(f"the deadline of {seconds:g} s passed {where}"), now)
        if len(self._deadlines) > 2 * self._in_flight + 1024:
            live = [(j.deadline, j.number, j.key) for c in self.clients.values() for j in c.jobs.values()]
            heapq.heapify(live)
            self._deadlines = live

    def _expire_workerless(self, now: float) -> None:
        """Refuse new requests that no worker has come for. Begun ones wait for their deadline."""
        wait = self.settings.no_worker_wait_s
        for name, queue in list(self.queues.items()):
            served = self.models.get(name)
            if served is not None and served.workers:
                continue
            since = served.alone_since if served else self._started
            if now - since < wait:
                continue
            for job in queue.jobs():
                if job.begun or now - job.arrived < wait:
                    continue
                if served is None and self.models:
                    self._fail(job, ModelNotFound(f"model: nobody serves {name!r}", param="model"), now)
                else:
                    text = (
                        f"no worker serves {name!r} at present" if name else "no worker is there at present"
                    )
                    self._fail(job, Unavailable(text, retry_after_ms=1000), now)

    def _find(self, key: Key) -> Job | None:
        client = self.clients.get(key[0])
        return client.jobs.get(key[1]) if client else None

    # ── a request's ways ─────────────────────────────────────────────────────────────────────────

    def _dispatch(self, model: str, now: float) -> None:
        """Hand out what waits for a model while a worker has a free slot."""
        served, queue = self.models.get(model), self.queues.get(model)
        if served is None or queue is None:
            return
        suspects = True
        while (job := queue.first(suspects=suspects)) is not None:
            worker = choose(served.workers.values(), job, self.settings.affinity_tokens)
            if worker is not None:
                queue.remove(job)
                self._start(job, worker, now)
            elif job.suspect:
                suspects = False  # each worker has one in hand already: the others needn't wait for them
            else:
                return
        if not queue:
            del self.queues[model]

    def _dispatch_for(self, worker: Worker, now: float) -> None:
        for model in worker.ready.models:
            if model.name in self.queues:
                self._dispatch(model.name, now)

    def _start(self, job: Job, worker: Worker, now: float) -> None:
        job.move(State.RUNNING)
        job.dispatches += 1
        job.tokens = 0
        job.work_id = f"{job.number}.{job.dispatches}"
        job.worker = worker.identity
        if job.first_started is None:
            job.first_started = now
            self.metrics.dispatch_wait.observe(now - job.arrived)
        self.metrics.dispatched += 1
        self.metrics.continuations += bool(job.chunks)
        worker.take(job, now)
        self._fairness.charge(job.submit.tenant, job.submit.cost)
        self._say(
            worker.identity, p.Work(id=job.work_id, request_id=job.submit.id), [job.request, *job.chunks]
        )

    def _release(self, job: Job) -> None:
        """Part a request from its worker or its queue; tokens served replace the estimate."""
        if job.state is State.QUEUED:
            queue = self.queues[job.model]
            queue.remove(job)
            if not queue:
                del self.queues[job.model]
            return
        self.workers[job.worker].give(job)
        self._fairness.charge(job.submit.tenant, job.tokens - job.submit.cost)
        for queue in self.queues.values():
            queue.refunded(job.submit.tenant)

    def _end(self, job: Job, now: float) -> None:
        """Forget a request."""
        self._release(job)
        job.move(State.ENDED)
        client = self.clients[job.client]
        del client.jobs[job.submit.id]
        if not client.jobs:
            del self.clients[job.client]
        self._fairness.leave(job.submit.tenant)
        self._in_flight -= 1
        served = self.models.get(job.model)
        if served is not None:
            served.rate.count()

    def _drop(self, job: Job, now: float) -> None:
        """End a request that nobody waits for, and stop its worker."""
        running = job.state is State.RUNNING
        worker, work_id = self.workers.get(job.worker), job.work_id
        self._end(job, now)
        if running and worker is not None:
            self._say(worker.identity, p.CancelWork(ids=[work_id]))
            self._dispatch_for(worker, now)

    def _fail(self, job: Job, problem: LoadOnceError, now: float) -> None:
        """End a request with an error."""
        self.metrics.failed[problem.code] += 1
        self._log.info(
            "request_failed", request=job.submit.id, code=problem.code, attempts=job.dispatches,
            reason=problem.message,
        )  # fmt: skip
        self._tell(job.client, p.Failed.of(problem, job.submit.id), [], job.delimited)
        self._drop(job, now)

    def _lose(self, worker: Worker, reason: str, now: float, *, blame: bool = True) -> None:
        """A worker is gone: what it had in hand goes to the head of the queue."""
        level = self._log.warning if blame else self._log.info
        level(
            "worker_gone", worker=worker.name, pid=worker.ready.pid, reason=reason, in_hand=len(worker.jobs)
        )
        self.metrics.worker_deaths += blame
        jobs = list(worker.jobs.values())
        poison = []
        if blame:
            for job in jobs:
                job.note_death()
            poison = [job for job in jobs if job.is_poison(self.settings.max_attempts)]
        worker.move(WorkerState.GONE)
        for model in worker.models:
            served = self.models[model]
            del served.workers[worker.identity]
            if not served.workers:
                served.alone_since = now
        for job in poison:
            text = f"the request brought down {job.deaths} workers; it isn't tried again"
            self._fail(job, RequestFailed(text), now)
        self._take_back([job for job in jobs if job.state is State.RUNNING], now)
        del self.workers[worker.identity]

    def _take_back(self, jobs: list[Job], now: float) -> None:
        """Requests come back from a worker; they go on elsewhere with the chunks delivered."""
        for job in jobs:
            self._release(job)
            job.move(State.QUEUED)
            job.worker = b""
            self._log.info("request_taken_back", request=job.submit.id, chunks=len(job.chunks))
        for model in {job.model for job in jobs}:
            self._queue(model).add_begun([job for job in jobs if job.model == model])
            self._dispatch(model, now)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, identity: bytes, message: p.BrokerToClient, body: list[bytes], delimited: bool) -> None:
        frames = [p.encode(message), *body]
        self._out.append(("client", identity, [b"", *frames] if delimited else frames))

    def _say(self, identity: bytes, message: p.BrokerToWorker, body: Sequence[bytes] = ()) -> None:
        self._out.append(("worker", identity, [p.encode(message), *body]))

    # ── integrity ────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Compare everything that is kept twice.

        Raises:
            AssertionError: with the numbers that disagree; a bug of ours.
        """
        jobs = {j.key: j for c in self.clients.values() for j in c.jobs.values()}
        queued = {j.key for q in self.queues.values() for j in q.jobs()}
        running = {j.key for w in self.workers.values() for j in w.jobs.values()}
        assert len(jobs) == self._in_flight, f"{len(jobs)} requests kept, {self._in_flight} counted"
        assert not queued & running, f"queued and running: {queued & running}"
        assert set(jobs) == queued | running, f"neither: {set(jobs) ^ (queued | running)}"
        for job in jobs.values():
            assert (job.state is State.QUEUED) == (job.key in queued), f"{job.key} is {job.state}"
        for queue in self.queues.values():
            waiting = queue.jobs()
            assert len(queue) == len(waiting) > 0, f"queue counts {len(queue)}, has {len(waiting)}"
            assert queue.bytes == sum(j.size for j in waiting), f"queue counts {queue.bytes} bytes"
        for worker in self.workers.values():
            assert len(worker.jobs) <= worker.ready.slots, f"{worker.name}: {len(worker.jobs)} in hand"
            cost = sum(j.submit.cost for j in worker.jobs.values())
            assert cost == worker.cost, f"{worker.name} counts {worker.cost}, has {cost}"
            suspects = {id for id, j in worker.jobs.items() if j.suspect}
            assert suspects == worker.suspects and len(suspects) <= 1, f"{worker.name}: {suspects}"
        assert all(c.jobs for c in self.clients.values()), "a client without requests is kept"
        tenants = {j.submit.tenant for j in jobs.values()}
        assert set(self._fairness.served) == tenants, f"counters {set(self._fairness.served)}, live {tenants}"
