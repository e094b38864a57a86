"""The queue of one model: priority class first, then fair between tenants by tokens served, then by age.

Fairness follows virtual token counters (Sheng et al., *Fairness in Serving Large Language Models*, 2024):
each tenant has a counter of the tokens it was served; the backlogged tenant with the least goes first, and
one that comes back is lifted to the least of the others, so that idleness earns no credit. A running
request counts with its estimated cost; at its end the estimate is replaced by what was served.

All operations are O(log tenants), whatever the number of requests. Knows nothing of workers or sockets.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from broker.inflight import Job, Key


class Fairness:
    """The tenants' counters, shared by all queues of a broker."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._uses: dict[str, int] = {}

    def enter(self, tenant: str) -> None:
        """One more request of the tenant is in flight."""
        if tenant not in self._uses:
            self.served[tenant] = min(self.served.values(), default=0.0)
        self._uses[tenant] = self._uses.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """One request fewer. A tenant without any is forgotten."""
        self._uses[tenant] -= 1
        if not self._uses[tenant]:
            del self._uses[tenant], self.served[tenant]

    def charge(self, tenant: str, tokens: float) -> None:
        """Count tokens for (or, negative, back to) a tenant with requests in flight."""
        self.served[tenant] += tokens


class _Class:
    """One priority class: each tenant's requests by age, and who is next."""

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self.tenants: dict[str, OrderedDict[Key, Job]] = {}
        self._heap: list[tuple[float, str]] = []  # (served when pushed, tenant); stale entries are skipped

    def add(self, job: Job) -> None:
        tenant = job.submit.tenant
        queue = self.tenants.get(tenant)
        if queue is None:
            queue = self.tenants[tenant] = OrderedDict()
            heapq.heappush(self._heap, (self._fairness.served[tenant], tenant))
        queue[job.key] = job

    def remove(self, job: Job) -> None:
        tenant = job.submit.tenant
        queue = self.tenants[tenant]
        del queue[job.key]
        if not queue:
            del self.tenants[tenant]
        if len(self._heap) > 2 * len(self.tenants) + 16:
            self._rebuild()

    def first(self) -> Job | None:
        """The request that is due; it stays."""
        while self._heap:
            served, tenant = self._heap[0]
            if tenant not in self.tenants:
                heapq.heappop(self._heap)
            elif served != self._fairness.served[tenant]:
                heapq.heapreplace(self._heap, (self._fairness.served[tenant], tenant))
            else:
                return next(iter(self.tenants[tenant].values()))
        if self.tenants:
            self._rebuild()
            return self.first()
        return None

    def refunded(self, tenant: str) -> None:
        """A counter went down: an entry pushed before would come too late."""
        if tenant in self.tenants:
            heapq.heappush(self._heap, (self._fairness.served[tenant], tenant))

    def _rebuild(self) -> None:
        self._heap = [(self._fairness.served[tenant], tenant) for tenant in self.tenants]
        heapq.heapify(self._heap)


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
        """Put a new request at the end of its tenant's line."""
        level = job.submit.priority
        if level not in self._classes:
            self._classes[level] = _Class(self._fairness)
            self._classes = dict(sorted(self._classes.items()))
        self._classes[level].add(job)
        self._count(job, 1)

    def add_begun(self, jobs: list[Job]) -> None:
        """Put requests that were begun at the head, the oldest first."""
        for job in sorted(jobs, key=lambda job: job.number, reverse=len(jobs) > 1):
            line = self._suspects if job.suspect else self._handed_back
            newest = not line or next(reversed(line.values())).number < job.number
            line[job.key] = job
            if not newest:
                line.move_to_end(job.key, last=False)
            self._count(job, 1)

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
        begun = self._suspects.pop(job.key, None) or self._handed_back.pop(job.key, None)
        if begun is None:
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
        lines = [q.values() for line in self._classes.values() for q in line.tenants.values()]
        begun = [*self._suspects.values(), *self._handed_back.values()]
        return [*begun, *(job for line in lines for job in line)]

    def by_tenant(self) -> dict[str, int]:
        """How many wait, by tenant."""
        counts: dict[str, int] = {}
        for job in self.jobs():
            counts[job.submit.tenant] = counts.get(job.submit.tenant, 0) + 1
        return counts

    def _count(self, job: Job, sign: int) -> None:
        self.count += sign
        self.bytes += sign * job.size
