"""The queue of one model: requests that were begun, then by priority class, fair between tenants, by age.

All operations but `jobs` are O(log tenants), whatever the number of requests. Knows nothing of workers or
sockets.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from broker.fairness import Fairness, LeastFirst
from broker.inflight import Job, Key


class _Class:
    """One priority class: each tenant's requests by age, and whose turn it is."""

    def __init__(self, fairness: Fairness) -> None:
        self.tenants: dict[str, OrderedDict[Key, Job]] = {}
        self._turns = LeastFirst(fairness, self.tenants)

    def add(self, job: Job) -> None:
        tenant = job.submit.tenant
        line = self.tenants.get(tenant)
        if line is None:
            line = self.tenants[tenant] = OrderedDict()
            self._turns.push(tenant)
        line[job.key] = job

    def remove(self, job: Job) -> None:
        tenant = job.submit.tenant
        line = self.tenants[tenant]
        del line[job.key]
        if not line:
            del self.tenants[tenant]

    def first(self) -> Job | None:
        """The request that is due; it stays."""
        tenant = self._turns.first()
        return None if tenant is None else next(iter(self.tenants[tenant].values()))

    def refunded(self, tenant: str) -> None:
        """A counter went down: the entry pushed before would come too late."""
        if tenant in self.tenants:
            self._turns.push(tenant)


class _ByAge:
    """Requests in the order of their arrival at the broker, however they come in."""

    def __init__(self) -> None:
        self.jobs: dict[Key, Job] = {}
        self._heap: list[tuple[int, Key]] = []  # entries of requests that went are skipped

    def add(self, job: Job) -> None:
        self.jobs[job.key] = job
        if len(self._heap) > 2 * len(self.jobs) + 16:
            self._heap = [(other.number, other.key) for other in self.jobs.values()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (job.number, job.key))

    def remove(self, job: Job) -> None:
        del self.jobs[job.key]

    def first(self) -> Job | None:
        """The oldest; it stays."""
        while self._heap:
            number, key = self._heap[0]
            job = self.jobs.get(key)
            if job is not None and job.number == number:
                return job
            heapq.heappop(self._heap)
        return None


class Waiting:
    """Requests that wait for one model.

    Those that were begun before go ahead of all others, in the order of their arrival at the broker: first
    those that only go on, then those in quarantine, which may have to wait for a worker without suspects.
    """

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._going_on = _ByAge()
        self._quarantined = _ByAge()
        self._classes: dict[int, _Class] = {}
        self.count = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self.count

    def add(self, job: Job) -> None:
        """Put a new request at the end of its tenant's line, or one that was begun at the head."""
        if job.begun:
            (self._quarantined if job.quarantined else self._going_on).add(job)
        else:
            level = job.submit.priority
            if level not in self._classes:
                self._classes[level] = _Class(self._fairness)
                self._classes = dict(sorted(self._classes.items()))
            self._classes[level].add(job)
        self._count(job, 1)

    def first(self, *, quarantined: bool = True) -> Job | None:
        """The request that is due; it stays until `remove`. Those in quarantine may be passed over."""
        job = self._going_on.first()
        if job is None and quarantined:
            job = self._quarantined.first()
        if job is not None:
            return job
        for line in self._classes.values():
            job = line.first()
            if job is not None:
                return job
        return None

    def remove(self, job: Job) -> None:
        """Take a request out, from wherever it waits."""
        if job.begun:
            (self._quarantined if job.quarantined else self._going_on).remove(job)
        else:
            level = job.submit.priority
            self._classes[level].remove(job)
            if not self._classes[level].tenants:
                del self._classes[level]
        self._count(job, -1)

    def refunded(self, tenant: str) -> None:
        """Tell the lines that a tenant's counter went down."""
        for line in self._classes.values():
            line.refunded(tenant)

    def jobs(self) -> list[Job]:
        """All that wait, in no particular order. O(n)."""
        lines = [line.values() for level in self._classes.values() for line in level.tenants.values()]
        return [*self._begun(), *(job for line in lines for job in line)]

    def oldest(self) -> float | None:
        """When the first that waits arrived. O(tenants)."""
        firsts = [self._going_on.first(), self._quarantined.first()]
        for level in self._classes.values():
            firsts += [next(iter(line.values())) for line in level.tenants.values()]
        return min((job.arrived for job in firsts if job is not None), default=None)

    def by_tenant(self) -> dict[str, int]:
        """How many wait, by tenant. O(tenants + requests that were begun)."""
        counts: dict[str, int] = {}
        for level in self._classes.values():
            for tenant, line in level.tenants.items():
                counts[tenant] = counts.get(tenant, 0) + len(line)
        for job in self._begun():
            counts[job.submit.tenant] = counts.get(job.submit.tenant, 0) + 1
        return counts

    def _begun(self) -> list[Job]:
        return [*self._going_on.jobs.values(), *self._quarantined.jobs.values()]

    def _count(self, job: Job, sign: int) -> None:
        self.count += sign
        self.bytes += sign * job.size
