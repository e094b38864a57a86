"""Carries out what an admin asks: from a decoded message to the frames of its reply. No socket in here."""

from __future__ import annotations

from broker import protocol as p
from broker.errors import Cancelled, NotFound, Unavailable
from broker.exposition import exposition
from broker.scheduler import Scheduler
from broker.status import status
from broker.workers import Worker, WorkerState


class AdminServer:
    """Carries out admin messages on a scheduler.

    Args:
        scheduler: the core.
        started: when the broker began, in monotonic seconds.
        host: this machine, as its workers call it: process ids mean something on one machine only.
        pid: the broker's own, to be told.
    """

    def __init__(self, scheduler: Scheduler, started: float, host: str, pid: int) -> None:
        self._scheduler = scheduler
        self._life = scheduler.life
        self._started = started
        self._host = host
        self._pid = pid

    def answer(self, message: p.AdminMessage, now: float) -> list[bytes]:
        """The frames of the reply.

        Raises:
            LoadOnceError: the command can't be carried out; it says why.
        """
        body: list[bytes] = []
        said = ""
        match message:
            case p.AdminStatus():
                body = [p.encode(status(self._scheduler, self._started, self._pid, now))]
            case p.AdminMetrics():
                body = [exposition(self._scheduler, self._started, self._pid, now)]
            case p.AdminDrain():
                said = self.drain(message.worker, message.grace_ms, leave=message.exit)
            case p.AdminResume():
                said = self.resume(message.worker, now)
            case p.AdminCancel():
                said = self.cancel(message.id, now)
            case p.AdminGone():
                said = self.gone(message.pid, message.worker, now)
        return [p.encode(p.AdminReply(message=said)), *body]

    def drain(self, name: str, grace_ms: int, *, leave: bool) -> str:
        """Give a worker no new work; with `leave` it is told to go after its grace.

        Raises:
            NotFound: no worker has this name.
        """
        worker = self._named(name)
        if worker.state is WorkerState.READY:
            worker.move(WorkerState.DRAINING)
        if leave:
            worker.leaving = True
            self._life.say(worker.identity, p.Drain(grace_ms=grace_ms))
        return f"{name} takes no new work"

    def resume(self, name: str, now: float) -> str:
        """Give a drained worker work again.

        Raises:
            NotFound: no worker has this name.
            Unavailable: it is on its way out.
        """
        worker = self._named(name)
        if worker.leaving:
            raise Unavailable(f"worker: {name!r} is leaving; it can't be called back", param="worker")
        if worker.state is WorkerState.DRAINING:
            worker.move(WorkerState.READY)
        self._life.dispatch_for(worker, now)
        return f"{name} takes work"

    def cancel(self, id: str, now: float) -> str:
        """Cancel the requests that clients call `id`.

        Raises:
            NotFound: nobody has such a request in flight.
        """
        clients = self._life.in_flight.clients.values()
        jobs = [client.jobs[id] for client in clients if id in client.jobs]
        if not jobs:
            raise NotFound(f"id: no request {id!r} is in flight", param="id")
        for job in jobs:
            self._life.fail(job, Cancelled("The request was cancelled by an operator."), now)
        return f"cancelled {len(jobs)}"

    def gone(self, pid: int, name: str, now: float) -> str:
        """A process of this machine exited: its worker, if it is one, is gone at once."""
        found = [
            worker
            for worker in self._life.workers.values()
            if (worker.ready.pid, worker.ready.host) == (pid, self._host) and name in ("", worker.name)
        ]
        for worker in found:
            self._life.lose(worker, "its process exited", now)
        return "its requests go on elsewhere" if found else "no such worker"

    def _named(self, name: str) -> Worker:
        for worker in self._life.workers.values():
            if worker.name == name:
                return worker
        raise NotFound(f"worker: there is no {name!r}", param="worker")
