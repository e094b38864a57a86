"""The broker's pure core: events and the time go in, messages to send come out.

No socket, thread, clock or randomness in here; bodies are bytes that are kept and passed on, never decoded.
The caller calls one ``on_…`` method for each event, `tick` a few times a second, and sends what `take`
returns, in order. Which event means what is decided here; `lifecycle` moves the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from broker import integrity
from broker import protocol as p
from broker.catalogue import LOBBY
from broker.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LoadOnceError,
    ModelNotFound,
    NotFound,
    ProtocolError,
    Unavailable,
    VersionMismatch,
)
from broker.inflight import Job, State
from broker.lifecycle import Lifecycle, Outgoing, Side
from broker.logs import Log
from broker.metrics import Metrics
from broker.settings import BrokerSettings
from broker.workers import Worker, WorkerState, check_version, refuse

TICK_S: Final = 0.25  # how often `tick` is due
GAP_S: Final = 1.5  # a longer silence of our own means that we were paused, not the others
REGISTERING_S: Final = p.LIVENESS_S  # after our start, workers that knew our predecessor still come back
Grouped = dict[tuple[bytes, bool], tuple[list[str], list[bytes]]]  # client, delimited → ids, frames

REFUSALS_KEPT: Final = 1000  # refused workers whose refusal isn't logged again


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
        self.life = Lifecycle(settings, session, self.metrics, log)
        self._number = 0
        self._started = now
        self._ticked = now
        self._beat_sent = now
        self._refused: set[tuple[bytes, str]] = set()
        self._log = log

    def take(self) -> list[Outgoing]:
        """Messages to send, in order; the caller owns them now."""
        out, self.life.out = self.life.out, []
        return out

    def check(self) -> None:
        """Compare everything that is kept twice; raises `AssertionError` with the numbers that disagree."""
        integrity.check(self.life)

    # ── events from clients ──────────────────────────────────────────────────────────────────────

    def on_client(
        self, identity: bytes, message: p.ClientMessage, body: Sequence[bytes], delimited: bool, now: float
    ) -> None:
        """A decoded message of a client."""
        client = self.life.in_flight.clients.get(identity)
        if client is not None:
            client.heard = now
        match message:
            case p.Submit():
                self._on_submit(identity, message, body, delimited, now)
            case p.Cancel():
                job = client.jobs.get(message.id) if client else None
                if job is not None:
                    self.life.fail(job, Cancelled("The request was cancelled by its client."), now)
            case p.Ping():
                self._on_ping(identity, message, delimited)
            case p.ListModels():
                self._on_list_models(identity, message, delimited)

    def on_malformed(
        self, side: Side, identity: bytes, problem: ProtocolError, delimited: bool = False
    ) -> None:
        """A message that can't be decoded: counted, and its peer is told."""
        self.metrics.malformed += 1
        if side == "client":
            self.life.tell(identity, p.Failed.of(problem), [], delimited)

    def _on_submit(
        self, identity: bytes, submit: p.Submit, body: Sequence[bytes], delimited: bool, now: float
    ) -> None:
        self.metrics.submitted += 1
        again = self.life.in_flight.find((identity, submit.id))
        if again is not None:
            self.metrics.replaced += 1
            self.life.drop(again, now)  # the client has started over with what it knows
        try:
            job = self._job(identity, submit, body, delimited, now)
            self.life.check_room(job)
        except LoadOnceError as problem:
            self.metrics.failed[problem.code] += 1
            self.life.tell(identity, p.Failed.of(problem, submit.id), [], delimited)
            return
        self.life.admit(job, now)

    def _job(
        self, identity: bytes, submit: p.Submit, body: Sequence[bytes], delimited: bool, now: float
    ) -> Job:
        """The request as we keep it, or the error that refuses it."""
        check_version(submit.version)
        if not body:
            raise InvalidRequest("request: a submit needs one as its first body frame", param="request")
        model = self._resolve(submit.model, now)
        seconds = submit.deadline_ms / 1000 if submit.deadline_ms else self.settings.default_deadline_s
        self._number += 1
        return Job(
            key=(identity, submit.id), number=self._number, submit=submit, model=model, request=body[0],
            chunks=list(body[1:]), arrived=now, deadline=now + seconds, delimited=delimited,
        )  # fmt: skip

    def _resolve(self, name: str, now: float) -> str:
        """The model's own name, or the lobby while its workers may still be coming back."""
        known = self.life.catalogue.resolve(name)
        if known is not None:
            return known
        if not self.life.catalogue.models or now - self._started < REGISTERING_S:
            return LOBBY
        raise _nobody_serves(name)

    def _on_ping(self, identity: bytes, ping: p.Ping, delimited: bool) -> None:
        client = self.life.in_flight.clients.get(identity)
        mine: dict[str, Job] = client.jobs if client else {}
        if client is not None:
            client.pings = True
        unknown = [id for id in ping.pending if id not in mine]
        pong = p.Pong(session=self.session, unknown=unknown, stamp=ping.stamp)
        self.life.tell(identity, pong, [], delimited)

    def _on_list_models(self, identity: bytes, message: p.ListModels, delimited: bool) -> None:
        answer: p.BrokerToClient = p.Models(models=self.life.catalogue.infos(), session=self.session)
        try:
            check_version(message.version)
        except VersionMismatch as problem:
            answer = p.Failed.of(problem)
        self.life.tell(identity, answer, [], delimited)

    # ── events from workers ──────────────────────────────────────────────────────────────────────

    def on_worker(self, identity: bytes, message: p.WorkerMessage, body: Sequence[bytes], now: float) -> None:
        """A decoded message of a worker."""
        if isinstance(message, p.Ready):
            self._on_ready(identity, message, now)
            return
        worker = self.life.workers.get(identity)
        if worker is None:
            self._on_stranger(identity, message)
            return
        worker.heard = now
        match message:
            case p.Chunks():
                self._on_chunks(worker, message, body, now)
            case p.Done():
                self._on_done(worker, message, body, now)
            case p.Failed():
                self._on_failed(worker, message, now)
            case p.WorkerBeat():
                self._on_beat(worker, message, now)
            case p.HandOff():
                self._on_handoff(worker, message, now)
            case p.Leave():
                self.life.lose(worker, "it left", now, blame=False)

    def _on_stranger(self, identity: bytes, message: p.WorkerMessage) -> None:
        """A worker that isn't registered (we restarted, or took it for dead): it learns our session."""
        if isinstance(message, p.Chunks):
            self.metrics.stray += len(message.ids)
            self.life.say(identity, p.CancelWork(ids=message.ids))
        elif isinstance(message, p.Done | p.Failed):
            self.metrics.stray += 1
        elif isinstance(message, p.WorkerBeat):
            # Its own session is the same as ours if we gave it up: an error makes it register again.
            self.life.say(identity, p.BrokerBeat(session=self.session))
            wanted = NotFound("you are not registered: send ready again")
            self.life.say(identity, p.Failed.of(wanted))

    def _on_ready(self, identity: bytes, ready: p.Ready, now: float) -> None:
        known = self.life.workers.get(identity)
        if known is not None:
            self.life.lose(known, "it registered again", now, blame=False)
        refusal = refuse(ready, self.life.workers.values())
        if refusal is not None:
            self._log_refusal(identity, ready, refusal)
            self.life.say(identity, p.Failed.of(refusal))
            return
        worker = Worker(identity, ready, now)
        self._log.info(
            "worker_ready", worker=ready.name, device=ready.device, host=ready.host, pid=ready.pid,
            models=worker.models, slots=ready.slots,
        )  # fmt: skip
        self.life.say(identity, p.BrokerBeat(session=self.session))
        self.life.welcome(worker, now)

    def _log_refusal(self, identity: bytes, ready: p.Ready, refusal: LoadOnceError) -> None:
        """Once for each worker and reason: it will ask again every second."""
        self.metrics.workers_refused += 1
        if (identity, refusal.message) in self._refused:
            return
        if len(self._refused) >= REFUSALS_KEPT:
            self._refused.clear()
        self._refused.add((identity, refusal.message))
        self._log.warning("worker_refused", worker=ready.name, pid=ready.pid, reason=refusal.message)

    def _on_beat(self, worker: Worker, beat: p.WorkerBeat, now: float) -> None:
        worker.note_beat(beat, now)
        if worker.jobs and now - worker.stepped >= self.settings.stall_s:
            self.life.say(worker.identity, p.Drain(grace_ms=0))
            self.life.lose(worker, f"no step in {self.settings.stall_s:g} s with work in hand", now)

    def _on_chunks(self, worker: Worker, message: p.Chunks, body: Sequence[bytes], now: float) -> None:
        """File one step's output and regroup it: one message for each client that streams."""
        ids, tokens = message.ids, message.tokens or [0] * len(message.ids)
        if not len(ids) == len(body) == len(tokens):
            wrong = f"chunk: {len(ids)} ids, {len(tokens)} token counts and {len(body)} frames"
            self._on_wrong(worker, ProtocolError(wrong))
            return
        suspects = bool(worker.suspects)
        grouped = self._file(worker, zip(ids, body, tokens, strict=True))
        made = sum(tokens)
        worker.tokens += made
        self.metrics.tokens += made
        for (identity, delimited), (names, frames) in grouped.items():
            self.life.tell(identity, p.Chunks(ids=names), frames, delimited)
        if suspects and not worker.suspects:
            self.life.dispatch_for(worker, now)  # what is in quarantine may have waited for this

    def _file(self, worker: Worker, output: Iterable[tuple[str, bytes, int]]) -> Grouped:
        """Keep each chunk with its request; returns those to forward, by client."""
        grouped: Grouped = {}
        in_hand = worker.jobs
        for id, frame, count in output:
            job = in_hand.get(id)
            if job is None:
                self.metrics.stray += 1
                continue
            if job.deaths:
                worker.suspects.discard(id)
            job.keep_chunk(frame, count)
            if job.submit.stream:
                group = grouped.get((job.client, job.delimited))
                if group is None:
                    group = grouped[job.client, job.delimited] = ([], [])
                group[0].append(job.submit.id)
                group[1].append(frame)
        return grouped

    def _on_wrong(self, worker: Worker, problem: ProtocolError) -> None:
        """A message whose parts don't fit together: counted, and each worker's first is logged."""
        self.on_malformed("worker", worker.identity, problem)
        if not worker.wrong:
            worker.wrong = True
            self._log.warning("malformed", side="worker", worker=worker.name, reason=problem.message)

    def _on_done(self, worker: Worker, message: p.Done, body: Sequence[bytes], now: float) -> None:
        job = worker.jobs.get(message.id)
        if job is None:
            self.metrics.stray += 1
            return
        try:
            usage = p.outcome_body.decode(body[0]).usage
        except (IndexError, msgspec.MsgspecError, RecursionError) as problem:
            self._on_wrong(worker, ProtocolError(f"done: it needs an outcome as its body: {problem}"))
            self.life.fail(job, InternalError("The worker ended the request without an outcome."), now)
            return
        job.prompt_tokens = max(0, usage.prompt_tokens - usage.cached_tokens)
        self.metrics.done += 1
        started = job.first_started if job.first_started is not None else now
        queued_ms = int(1000 * (started - job.arrived))
        done = p.Done(id=job.submit.id, worker=worker.name, attempts=job.dispatches, queued_ms=queued_ms)
        frames = [body[0]] if job.submit.stream else [body[0], *job.chunks]
        self.life.end(job)
        self.life.tell(job.client, done, frames, job.delimited)
        self.life.dispatch_for(worker, now)

    def _on_failed(self, worker: Worker, message: p.Failed, now: float) -> None:
        job = worker.jobs.get(message.id)
        if job is None:
            self.metrics.stray += 1
            return
        self.life.fail(job, message.exception(), now, stop_worker=False)

    def _on_handoff(self, worker: Worker, message: p.HandOff, now: float) -> None:
        jobs = [worker.jobs[id] for id in dict.fromkeys(message.ids) if id in worker.jobs]
        self.metrics.handoffs += len(jobs)
        if worker.state is WorkerState.READY:
            worker.move(WorkerState.DRAINING)  # it hands back because it goes; never give it the same again
        worker.leaving = True
        self.life.take_back(jobs, now)

    # ── events from the shell ────────────────────────────────────────────────────────────────────

    def on_client_gone(self, identity: bytes, reason: str, now: float) -> None:
        """A client can't be reached: what it waited for is dropped."""
        jobs = self.life.in_flight.of(identity)
        if not jobs:
            return
        self._log.info("client_gone", client=identity.hex(), requests=len(jobs), reason=reason)
        for job in jobs:
            self.metrics.failed["client_gone"] += 1
            self.life.drop(job, now)

    def on_worker_unroutable(self, identity: bytes, now: float, headers: Sequence[bytes] = ()) -> None:
        """Messages could not be handed to a worker: it is gone. Work among them had no part in that."""
        worker = self.life.workers.get(identity)
        if worker is not None:
            unsent = [p.decode_header(p.to_worker, header) for header in headers]
            spared = frozenset(message.id for message in unsent if isinstance(message, p.Work))
            self.life.lose(worker, "it can't be reached", now, spared=spared)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> None:
        """Let time pass: beats, deadlines, peers that fell silent. Due each `TICK_S` seconds."""
        gap, self._ticked = now - self._ticked, now
        if gap > GAP_S:
            self._forgive(gap)
        self._beat(now)
        self._expire(now)
        limit = p.LIVENESS_S
        for worker in [w for w in self.life.workers.values() if now - w.heard > limit]:
            self.life.lose(worker, f"silent for {limit:g} s", now)
        for identity in self.life.in_flight.silent(now, limit):
            self.on_client_gone(identity, f"silent for {limit:g} s", now)
        self.life.catalogue.tick(now)
        self._expire_workerless(now)

    def _forgive(self, gap: float) -> None:
        """We were paused: what peers sent meanwhile is still to be read, so nobody was silent."""
        self._log.warning("broker_paused", seconds=round(gap, 3))
        for worker in self.life.workers.values():
            worker.heard += gap
            worker.stepped += gap
        for client in self.life.in_flight.clients.values():
            client.heard += gap

    def _beat(self, now: float) -> None:
        if now - self._beat_sent < p.BEAT_INTERVAL_S:
            return
        self._beat_sent = now
        for worker in self.life.workers.values():
            self.life.say(worker.identity, p.BrokerBeat(session=self.session))

    def _expire(self, now: float) -> None:
        for job in self.life.in_flight.overdue(now):
            where = "while it waited" if job.state is State.QUEUED else "while it ran"
            text = f"the deadline of {job.deadline - job.arrived:g} s passed {where}"
            self.life.fail(job, DeadlineExceeded(text), now)

    def _expire_workerless(self, now: float) -> None:
        """Refuse new requests that no worker has come for. Begun ones wait for their deadline."""
        for name, queue in list(self.life.queues.items()):
            if self.life.catalogue.workers_of(name):
                continue
            for job in queue.jobs():
                problem = None if job.begun else self._given_up(job, now)
                if problem is not None:
                    self.life.fail(job, problem, now)

    def _given_up(self, job: Job, now: float) -> LoadOnceError | None:
        """Why a request has waited long enough for a worker to come, or None."""
        served = self.life.catalogue.models.get(job.model)
        if served is None and self.life.catalogue.models:
            over = now - self._started >= REGISTERING_S
            return _nobody_serves(job.submit.model) if over else None
        since = max(job.arrived, served.alone_since if served else self._started)
        if now - since < self.settings.no_worker_wait_s:
            return None
        what = f"no worker serves {job.model!r} at present" if served else "no worker is there at present"
        return Unavailable(what, retry_after_ms=1000)


def _nobody_serves(name: str) -> ModelNotFound:
    return ModelNotFound(f"model: nobody serves {name!r}", param="model")
