"""A request's ways through the broker: admitted, queued, running, ended. The only place that moves one.

Part of the pure core: what it has to say is collected in `out`, and the scheduler's caller sends it. The
events that lead here are `scheduler`'s.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final, Literal

from broker import protocol as p
from broker.catalogue import LOBBY, Catalogue
from broker.errors import LoadOnceError, Overloaded, RequestFailed, Unavailable
from broker.fairness import Fairness
from broker.inflight import InFlight, Job, State
from broker.logs import Log
from broker.metrics import Metrics
from broker.settings import BrokerSettings
from broker.waiting import Waiting
from broker.workers import Worker, WorkerState, choose

MIN_RETRY_MS, MAX_RETRY_MS = 100, 60_000
UNKNOWN_RETRY_MS: Final = 1000  # nothing was measured yet
MIB: Final = 1024 * 1024
BEGUN_FACTOR: Final = 2  # requests that were begun before may fill a queue to this multiple of its bounds

Side = Literal["client", "worker"]
Outgoing = tuple[Side, bytes, list[bytes]]  # side, routing id, frames


class Lifecycle:
    """Queues, workers and requests in flight, and the moves between them.

    Args:
        settings: bounds and times.
        session: names this life of the broker.
        metrics: counts what happens.
        log: for events that an operator wants to see.
    """

    def __init__(self, settings: BrokerSettings, session: str, metrics: Metrics, log: Log) -> None:
        self.settings = settings
        self.metrics = metrics
        self.log = log
        self.catalogue = Catalogue()
        self.in_flight = InFlight()
        self.fairness = Fairness()
        self.workers: dict[bytes, Worker] = {}  # by routing id
        self.queues: dict[str, Waiting] = {}  # by model; none is empty
        self.out: list[Outgoing] = []
        # A worker may still say something about the work of a broker before us; it must not fit ours.
        self._work_prefix = session[:6]

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def check_room(self, job: Job) -> None:
        """Ask whether a queue and its client have room.

        What was begun before was accepted before (by a broker that is no more): it gets in beside what
        waits, up to a bound of its own.

        Raises:
            Overloaded: the client or the queue is at its bound.
            Unavailable: the queue is, and no worker is there to empty it.
        """
        limit = self.settings.client_limit
        if self.in_flight.count_of(job.client) >= limit:
            raise Overloaded(f"one client may have {limit} requests in flight", retry_after_ms=MIN_RETRY_MS)
        queue = self.queues.get(job.model)
        factor = BEGUN_FACTOR if job.begun else 1
        count, mib = factor * self.settings.queue_limit, factor * self.settings.queue_mib
        waiting, size = (len(queue), queue.bytes) if queue is not None else (0, 0)
        if waiting < count and size + job.size <= mib * MIB:
            return
        name, hint = job.submit.model or job.model, self.retry_hint(job.model)
        if not self.catalogue.workers_of(job.model):
            raise Unavailable(f"no worker serves {name!r} and its queue is full", retry_after_ms=hint)
        bound = f"{count} requests" if waiting >= count else f"{mib} MiB"
        raise Overloaded(f"the queue of {name!r} is full ({bound})", retry_after_ms=hint)

    def retry_hint(self, model: str) -> int:
        """Milliseconds until a full queue may have room, from the rate at which requests end."""
        served, queue = self.catalogue.models.get(model), self.queues.get(model)
        if served is None or not served.workers or served.rate.per_second <= 0 or queue is None:
            return UNKNOWN_RETRY_MS
        due = int(1000 * len(queue) / served.rate.per_second / 10)  # a tenth of it: room, not emptiness
        return min(max(due, MIN_RETRY_MS), MAX_RETRY_MS)

    def admit(self, job: Job, now: float) -> None:
        """Take a request in. `check_room` was asked before."""
        self.in_flight.add(job, now)
        self.fairness.enter(job.submit.tenant)
        if job.model not in self.queues:  # nobody is before it: it needn't queue if a slot is free
            workers = self.catalogue.workers_of(job.model)
            worker = choose(workers.values(), job, self.settings.affinity_tokens) if workers else None
            if worker is not None:
                self._start(job, worker, now)
                return
        self._enqueue(job)
        self.dispatch(job.model, now)

    def _enqueue(self, job: Job) -> None:
        queue = self.queues.get(job.model)
        if queue is None:
            queue = self.queues[job.model] = Waiting(self.fairness)
        queue.add(job)

    def _unqueue(self, job: Job) -> None:
        queue = self.queues[job.model]
        queue.remove(job)
        if not queue:
            del self.queues[job.model]

    # ── queued → running ─────────────────────────────────────────────────────────────────────────

    def dispatch(self, model: str, now: float) -> None:
        """Hand out what waits for a model while a worker has a free slot."""
        workers, queue = self.catalogue.workers_of(model), self.queues.get(model)
        quarantined = True
        while queue and workers and (job := queue.first(quarantined=quarantined)) is not None:
            worker = choose(workers.values(), job, self.settings.affinity_tokens)
            if worker is not None:
                self._unqueue(job)
                self._start(job, worker, now)
            elif job.quarantined and quarantined:
                quarantined = False  # every worker has suspects in hand: the others needn't wait for them
            else:
                return

    def dispatch_for(self, worker: Worker, now: float) -> None:
        """Hand out what waits for a worker's models."""
        for model in worker.ready.models:
            if model.name in self.queues:
                self.dispatch(model.name, now)

    def _start(self, job: Job, worker: Worker, now: float) -> None:
        job.move(State.RUNNING)
        job.dispatches += 1
        job.tokens = 0
        job.work_id = f"{self._work_prefix}-{job.number}.{job.dispatches}"
        job.worker = worker.identity
        if job.first_started is None:
            job.first_started = now
            self.metrics.dispatch_wait.observe(now - job.arrived)
        self.metrics.dispatched += 1
        self.metrics.continuations += bool(job.chunks)
        worker.take(job, now)
        self.fairness.begin(job.submit.tenant, job.submit.cost)
        self.say(
            worker.identity, p.Work(id=job.work_id, request_id=job.submit.id), [job.request, *job.chunks]
        )

    # ── running → queued ─────────────────────────────────────────────────────────────────────────

    def take_back(self, jobs: Sequence[Job], now: float) -> None:
        """Requests come back from a worker; they go on elsewhere with the chunks delivered."""
        for job in jobs:
            self._part(job)
            job.move(State.QUEUED)
            job.worker = b""
            self._enqueue(job)
            self.log.info("request_taken_back", request=job.submit.id, chunks=len(job.chunks))
        for model in {job.model for job in jobs}:
            self.dispatch(model, now)

    def _part(self, job: Job) -> None:
        """Part a running request from its worker; tokens served replace the estimate."""
        self.workers[job.worker].give(job)
        tenant = job.submit.tenant
        if self.fairness.correct(tenant, job.tokens + job.prompt_tokens - job.submit.cost):
            for queue in self.queues.values():
                queue.refunded(tenant)

    def lose(
        self, worker: Worker, reason: str, now: float, *, blame: bool = True, spared: Set[str] = frozenset()
    ) -> None:
        """A worker is gone: what it had in hand goes to the head of the queue.

        With `blame`, it went down with the requests in hand, and one that did so too often is ended; not
        those `spared` (work ids), which never reached it.
        """
        level = self.log.warning if blame else self.log.info
        level(
            "worker_gone", worker=worker.name, pid=worker.ready.pid, reason=reason, in_hand=len(worker.jobs)
        )
        self.metrics.worker_deaths += blame
        jobs = list(worker.jobs.values())
        worker.move(WorkerState.GONE)
        self.catalogue.leave(worker, now)
        if blame:
            blamed = [job for job in jobs if job.work_id not in spared]
            self._end_poison(worker.suspects - spared, blamed, now)
        self.take_back([job for job in jobs if job.state is State.RUNNING], now)
        del self.workers[worker.identity]

    def _end_poison(self, suspects: Set[str], jobs: Sequence[Job], now: float) -> None:
        """Count a worker's death against what it had in hand, and end what has had too many."""
        limit = self.settings.max_attempts
        for job in jobs:
            job.note_death(limit)
        for job in jobs:
            if job.is_poison(limit, alone=suspects <= {job.work_id}):
                text = f"the request brought down {job.deaths_in_all} workers; it isn't tried again"
                self.fail(job, RequestFailed(text), now, stop_worker=False)

    # ── → ended ──────────────────────────────────────────────────────────────────────────────────

    def end(self, job: Job) -> Worker | None:
        """Forget a request; returns the worker that is rid of it, whose slot is to be filled again."""
        worker = self.workers[job.worker] if job.state is State.RUNNING else None
        if worker is None:
            self._unqueue(job)
        else:
            self._part(job)
        job.move(State.ENDED)
        self.in_flight.remove(job)
        self.fairness.leave(job.submit.tenant)
        self.catalogue.count_end(job.model)
        return worker

    def drop(self, job: Job, now: float, *, stop_worker: bool = True) -> None:
        """End a request that nobody waits for, and stop its worker."""
        worker = self.end(job)
        if worker is not None and stop_worker:
            self.say(worker.identity, p.CancelWork(ids=[job.work_id]))
        if worker is not None:
            self.dispatch_for(worker, now)

    def fail(self, job: Job, problem: LoadOnceError, now: float, *, stop_worker: bool = True) -> None:
        """End a request with an error."""
        self.metrics.failed[problem.code] += 1
        self.log.info(
            "request_failed", request=job.submit.id, code=problem.code, attempts=job.dispatches,
            reason=problem.message,
        )  # fmt: skip
        self.tell(job.client, p.Failed.of(problem, job.submit.id), [], job.delimited)
        self.drop(job, now, stop_worker=stop_worker)

    # ── a new worker ─────────────────────────────────────────────────────────────────────────────

    def welcome(self, worker: Worker, now: float) -> None:
        """A worker takes part: those in the lobby who waited for its models move to their queues."""
        self.workers[worker.identity] = worker
        self.catalogue.enter(worker)
        lobby = self.queues.get(LOBBY)
        for job in sorted(lobby.jobs() if lobby else [], key=lambda job: job.number):
            model = self.catalogue.resolve(job.submit.model)
            if model is not None:
                self._unqueue(job)
                job.model = model
                self._enqueue(job)
        self.dispatch_for(worker, now)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def tell(
        self, identity: bytes, message: p.BrokerToClient, body: Sequence[bytes], delimited: bool
    ) -> None:
        """Say something to a client."""
        frames = [p.encode(message), *body]
        self.out.append(("client", identity, [b"", *frames] if delimited else frames))

    def say(self, identity: bytes, message: p.BrokerToWorker, body: Sequence[bytes] = ()) -> None:
        """Say something to a worker."""
        self.out.append(("worker", identity, [p.encode(message), *body]))
