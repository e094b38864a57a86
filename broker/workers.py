"""Who is in the pool: credits, beats, liveness, known prefixes; and which worker gets a request.

Knows nothing of queues or sockets. Times are monotonic seconds, as the scheduler is told them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from broker.errors import InvalidRequest, LoadOnceError, Unavailable, VersionMismatch
from broker.inflight import Job
from broker.protocol import VERSION, Ready, WorkerBeat

PREFIXES_KEPT: Final = 65_536  # hashes remembered per worker


class WorkerState(enum.Enum):
    """Where a registered worker is in its life; one that is gone is forgotten."""

    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


#: What may follow what.
WORKER_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.DRAINING: frozenset({WorkerState.READY, WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}


class Worker:
    """One registered worker.

    Credits are derived: a worker has as many free slots as it declared, less what it has in hand.
    """

    def __init__(self, identity: bytes, ready: Ready, now: float) -> None:
        self.identity = identity
        self.ready = ready
        self.state = WorkerState.READY
        self.leaving = False  # it was told to go, or began to hand back: it doesn't come back to work
        self.jobs: dict[str, Job] = {}  # by work id
        self.cost = 0  # outstanding tokens, estimated
        self.suspects: set[str] = set()  # work ids of what may have brought its last worker down
        self.heard = now
        self.beat = WorkerBeat(session="")
        self.stepped = now  # when the step counter last moved, or work first came
        self.registered = now
        self.tokens = 0  # forwarded from it
        self.prefixes: OrderedDict[int, None] = OrderedDict()
        self.wrong = False  # it has sent a message whose parts don't fit together

    @property
    def name(self) -> str:
        """The worker's name in the pool."""
        return self.ready.name

    @property
    def free_slots(self) -> int:
        """Requests that it can take now."""
        return self.ready.slots - len(self.jobs) if self.state is WorkerState.READY else 0

    @property
    def models(self) -> list[str]:
        """Names of the models that it serves, without aliases."""
        return [model.name for model in self.ready.models]

    def move(self, state: WorkerState) -> None:
        """Change the state.

        Raises:
            AssertionError: the table doesn't allow it, which is a bug of ours.
        """
        assert state in WORKER_TRANSITIONS[self.state], f"worker {self.name}: {self.state} → {state}"
        self.state = state

    def take(self, job: Job, now: float) -> None:
        """The worker gets a request. Its slot is free: `free_slots` was asked before."""
        assert self.free_slots > 0, f"worker {self.name} has {len(self.jobs)} of {self.ready.slots}"
        if not self.jobs:
            self.stepped = now
        self.jobs[job.work_id] = job
        if job.suspect:
            self.suspects.add(job.work_id)
        self.cost += job.submit.cost
        for block in job.submit.prefix:
            self.prefixes[block] = None
            self.prefixes.move_to_end(block)
        while len(self.prefixes) > PREFIXES_KEPT:
            self.prefixes.popitem(last=False)

    def give(self, job: Job) -> None:
        """The worker is rid of a request."""
        del self.jobs[job.work_id]
        self.suspects.discard(job.work_id)
        self.cost -= job.submit.cost

    def note_beat(self, beat: WorkerBeat, now: float) -> None:
        """Keep the worker's counters; a step that moved shows that it isn't stalled."""
        if beat.steps != self.beat.steps or not self.jobs:
            self.stepped = now
        self.beat = beat

    def known_blocks(self, prefix: list[int]) -> int:
        """How many leading blocks of a prefix it was sent before."""
        known = 0
        for block in prefix:
            if block not in self.prefixes:
                break
            known += 1
        return known


def check_version(version: int) -> None:
    """Raise `VersionMismatch` for a peer that speaks another version of the protocol."""
    if version != VERSION:
        raise VersionMismatch(f"version: this broker speaks {VERSION}, not {version}", param="version")


def refuse(ready: Ready, registered: Iterable[Worker]) -> LoadOnceError | None:
    """Why a worker isn't wanted beside those that are registered, or None."""
    try:
        check_version(ready.version)
    except VersionMismatch as problem:
        return problem
    names = [model.name for model in ready.models]
    if "" in names or len(set(names)) < len(names):
        return InvalidRequest("models: each needs a name of its own", param="models")
    for other in registered:
        who = f"worker {other.name} (pid {other.ready.pid} on {other.ready.host})"
        if other.name == ready.name:
            return Unavailable(f"name: {who} is alive and has this name", param="name")
        if _share_a_device(ready, other.ready) and not (ready.shared_device and other.ready.shared_device):
            return Unavailable(f"device: {who} is alive and has {ready.device}", param="device")
    return None


def _share_a_device(one: Ready, other: Ready) -> bool:
    """Whether both name the same device; one without a UUID (a CPU) is never the same."""
    return bool(one.device_uuid) and (one.host, one.device_uuid) == (other.host, other.device_uuid)


def choose(workers: Iterable[Worker], job: Job, margin: int) -> Worker | None:
    """The worker that gets a request, or None if none has a free slot.

    The one that knows most of its prefix, unless it has over `margin` tokens more in hand than the
    least loaded; else the least loaded.
    """
    free = [
        worker for worker in workers if worker.free_slots > 0 and not (job.quarantined and worker.suspects)
    ]
    if len(free) <= 1:
        return free[0] if free else None
    idlest = min(free, key=lambda worker: (worker.cost, len(worker.jobs), worker.registered))
    if not job.submit.prefix:
        return idlest
    known, _, best = max(
        ((w.known_blocks(job.submit.prefix), -w.cost, i) for i, w in enumerate(free)), default=(0, 0, 0)
    )
    knower = free[best]
    return knower if known and knower.cost - idlest.cost <= margin else idlest
