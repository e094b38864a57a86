"""The queue of one model: requests that were begun, then by priority class, fair between tenants, by age.

All operations but `jobs` are O(log tenants), whatever the number of requests. Knows nothing of workers or
sockets.
"""

from __future__ import annotations

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


class Waiting:
    """Requests that wait for one model.

    Those that were begun before go ahead of all others, in the order of their arrival at the broker: first
    the suspects, whose worker died with them in hand, then those that a worker handed back.
    """

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._suspects: OrderedDict[Key, Job] = OrderedDict()
        self._handed_back: OrderedDict[Key, Job] = OrderedDict()
        self._classes: dict[int, _Class] = {}
        self.count = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self.count

    def add(self, job: Job) -> None:
        """Put a new request at the end of its tenant's line, or one that was begun at the head."""
        if job.begun:
            self._add_begun(job)
        else:
            level = job.submit.priority
            if level not in self._classes:
                self._classes[level] = _Class(self._fairness)
                self._classes = dict(sorted(self._classes.items()))
            self._classes[level].add(job)
        self._count(job, 1)

    def _add_begun(self, job: Job) -> None:
        """Keeps the line in order of arrival; a newcomer is nearly always the oldest or the newest."""
        line = self._suspects if job.suspect else self._handed_back
        line[job.key] = job
        older = [j for j in line.values() if j.number > job.number]
        for other in older:
            line.move_to_end(other.key)

    def first(self, *, suspects: bool = True) -> Job | None:
        """The request that is due; it stays until `remove`. Suspects are passed over unless asked for."""
        if suspects and self._suspects:
            return next(iter(self._suspects.values()))
        if self._handed_back:
            return next(iter(self._handed_back.values()))
        for line in self._classes.values():
            job = line.first()
            if job is not None:
                return job
        return None

    def remove(self, job: Job) -> None:
        """Take a request out, from wherever it waits."""
        if job.begun:
            del (self._suspects if job.suspect else self._handed_back)[job.key]
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
        begun = [*self._suspects.values(), *self._handed_back.values()]
        return [*begun, *(job for line in lines for job in line)]

    def oldest(self) -> float | None:
        """When the first that waits arrived. O(tenants)."""
        begun = [next(iter(line.values())) for line in (self._suspects, self._handed_back) if line]
        lines = (line for level in self._classes.values() for line in level.tenants.values())
        firsts = [*begun, *(next(iter(line.values())) for line in lines)]
        return min((job.arrived for job in firsts), default=None)

    def by_tenant(self) -> dict[str, int]:
        """How many wait, by tenant. O(tenants + requests that were begun)."""
        counts: dict[str, int] = {}
        for level in self._classes.values():
            for tenant, line in level.tenants.items():
                counts[tenant] = counts.get(tenant, 0) + len(line)
        for job in [*self._suspects.values(), *self._handed_back.values()]:
            counts[job.submit.tenant] = counts.get(job.submit.tenant, 0) + 1
        return counts

    def _count(self, job: Job, sign: int) -> None:
        self.count += sign
        self.bytes += sign * job.size
