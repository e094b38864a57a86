"""What the broker says of itself to an admin: structs, made from the scheduler, with no way back into it."""

from __future__ import annotations

import heapq

from msgspec import Struct

from broker.catalogue import Served
from broker.inflight import Job
from broker.scheduler import Scheduler
from broker.waiting import Waiting


class WorkerStatus(Struct):
    """One worker."""

    name: str
    state: str  # ready, draining
    device: str
    host: str
    pid: int
    models: list[str]
    slots: int
    in_hand: int
    outstanding_tokens: int  # estimated
    kv_pages_used: int
    kv_pages_total: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    tokens: int  # in the chunks that came from it, up to this moment
    silent_s: float  # since its last message
    up_s: float  # since it registered


class ModelStatus(Struct):
    """One model and its queue."""

    name: str  # "" for requests whose model nobody has served yet
    aliases: list[str]
    workers: int  # registered
    ready: int  # of them, taking work
    waiting: int
    waiting_bytes: int
    oldest_s: float  # age of the oldest that waits
    tenants: dict[str, int]  # waiting, by tenant
    ended_per_s: float


class RequestStatus(Struct):
    """One request in flight."""

    id: str
    model: str
    tenant: str
    priority: int
    state: str  # queued, running
    worker: str
    age_s: float
    attempts: int
    chunks: int
    tokens: int  # in this attempt


class Status(Struct):
    """The whole."""

    session: str
    pid: int
    up_s: float
    in_flight: int
    clients: int
    workers: list[WorkerStatus]
    models: list[ModelStatus]
    requests: list[RequestStatus]  # the oldest `REQUESTS_SHOWN`
    submitted: int
    done: int
    failed: dict[str, int]  # by error code
    tokens: int
    continuations: int
    worker_deaths: int
    stray: int
    unroutable: int
    malformed: int
    replaced: int  # requests submitted again while in flight
    workers_refused: int


REQUESTS_SHOWN = 1000


def status(scheduler: Scheduler, started: float, pid: int, now: float, *, requests: bool = True) -> Status:
    """Describe the broker at a moment (monotonic seconds); single `requests` cost O(in flight)."""
    counted = scheduler.metrics
    return Status(
        session=scheduler.session,
        pid=pid,
        up_s=now - started,
        in_flight=scheduler.life.in_flight.count,
        clients=len(scheduler.life.in_flight.clients),
        workers=_workers(scheduler, now),
        models=_models(scheduler, now),
        requests=_requests(scheduler, now) if requests else [],
        submitted=counted.submitted,
        done=counted.done,
        failed=dict(counted.failed),
        tokens=counted.tokens,
        continuations=counted.continuations,
        worker_deaths=counted.worker_deaths,
        stray=counted.stray,
        unroutable=counted.unroutable,
        malformed=counted.malformed,
        replaced=counted.replaced,
        workers_refused=counted.workers_refused,
    )


def _workers(scheduler: Scheduler, now: float) -> list[WorkerStatus]:
    return [
        WorkerStatus(
            name=worker.name,
            state=worker.state.value,
            device=worker.ready.device,
            host=worker.ready.host,
            pid=worker.ready.pid,
            models=worker.models,
            slots=worker.ready.slots,
            in_hand=len(worker.jobs),
            outstanding_tokens=worker.cost,
            kv_pages_used=worker.beat.kv_pages_used,
            kv_pages_total=worker.beat.kv_pages_total,
            steps=worker.beat.steps,
            prompt_tokens=worker.beat.prompt_tokens,
            cached_tokens=worker.beat.cached_tokens,
            generated_tokens=worker.beat.generated_tokens,
            preemptions=worker.beat.preemptions,
            tokens=worker.tokens,
            silent_s=now - worker.heard,
            up_s=now - worker.registered,
        )
        for worker in sorted(scheduler.life.workers.values(), key=lambda worker: worker.name)
    ]


def _models(scheduler: Scheduler, now: float) -> list[ModelStatus]:
    models, queues = scheduler.life.catalogue.models, scheduler.life.queues
    names = dict.fromkeys([*models, *queues])
    return [_model(name, models.get(name), queues.get(name), now) for name in names]


def _model(name: str, served: Served | None, queue: Waiting | None, now: float) -> ModelStatus:
    found = ModelStatus(
        name=name, aliases=[], workers=0, ready=0, waiting=0, waiting_bytes=0, oldest_s=0.0, tenants={},
        ended_per_s=0.0,
    )  # fmt: skip
    if served is not None:
        found.aliases, found.workers, found.ready = served.info.aliases, len(served.workers), served.ready
        found.ended_per_s = served.rate.per_second
    if queue is not None:
        found.waiting, found.waiting_bytes, found.tenants = len(queue), queue.bytes, queue.by_tenant()
        found.oldest_s = now - (queue.oldest() or now)
    return found


def _requests(scheduler: Scheduler, now: float) -> list[RequestStatus]:
    oldest = heapq.nsmallest(REQUESTS_SHOWN, scheduler.life.in_flight.jobs(), key=_number)
    names = {identity: worker.name for identity, worker in scheduler.life.workers.items()}
    return [
        RequestStatus(
            id=job.submit.id,
            model=job.model,
            tenant=job.submit.tenant,
            priority=job.submit.priority,
            state=job.state.value,
            worker=names.get(job.worker, "") if job.state.value == "running" else "",
            age_s=now - job.arrived,
            attempts=job.dispatches,
            chunks=len(job.chunks),
            tokens=job.tokens,
        )
        for job in oldest
    ]


def _number(job: Job) -> int:
    return job.number
