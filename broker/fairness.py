"""Whose turn it is: tenants by the tokens they were served. Knows nothing of requests or queues.

Follows virtual token counters (Sheng et al., *Fairness in Serving Large Language Models*, 2024): of those
that wait, the tenant with the least goes first, and one that comes back is lifted to the least of the
others, so that idleness earns no credit. A running request counts with its estimated cost; at its end
the estimate is replaced by what was served.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

Standing = tuple[float, int]  # tokens served, number of the latest turn; the lesser goes first


class LeastFirst:
    """The least served of some tenants. Entries that have gone stale are mended when they come up.

    Args:
        fairness: the counters.
        members: who takes part; a living view, such as a dictionary.
    """

    def __init__(self, fairness: Fairness, members: Mapping[str, object]) -> None:
        self._fairness = fairness
        self._members = members
        self._heap: list[tuple[float, int, str]] = []

    def push(self, tenant: str) -> None:
        """A member came in, or its counter went down. O(log members)."""
        if len(self._members) == 1:
            self._heap = [(*self._fairness.standing(tenant), tenant)]
        elif len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [(*self._fairness.standing(member), member) for member in self._members]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (*self._fairness.standing(tenant), tenant))

    def first(self) -> str | None:
        """The member whose turn it is. O(log members), amortised."""
        while self._heap:
            served, turn, tenant = self._heap[0]
            if tenant not in self._members:
                heapq.heappop(self._heap)
                continue
            standing = self._fairness.standing(tenant)
            if (served, turn) == standing:
                return tenant
            heapq.heapreplace(self._heap, (*standing, tenant))
        return None


class Fairness:
    """The tenants' counters, shared by all queues of a broker."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}  # tokens, by tenant with requests in flight
        self._turns: dict[str, int] = {}
        self._uses: dict[str, int] = {}
        self._turn = 0
        self._least = LeastFirst(self, self.served)

    def standing(self, tenant: str) -> Standing:
        """What a tenant's turn goes by. Of two that were served alike, the one whose turn is longer ago."""
        return self.served[tenant], self._turns[tenant]

    def enter(self, tenant: str) -> None:
        """One more request of the tenant is in flight."""
        if tenant in self._uses:
            self._uses[tenant] += 1
            return
        least = self._least.first()
        self.served[tenant] = self.served[least] if least is not None else 0.0
        self._turns[tenant] = 0
        self._uses[tenant] = 1
        self._least.push(tenant)

    def leave(self, tenant: str) -> None:
        """One request fewer. A tenant without any is forgotten."""
        self._uses[tenant] -= 1
        if not self._uses[tenant]:
            del self._uses[tenant], self.served[tenant], self._turns[tenant]

    def begin(self, tenant: str, tokens: float) -> None:
        """A request of the tenant goes to a worker; it counts with its estimate."""
        self._turn += 1
        self._turns[tenant] = self._turn
        self.served[tenant] += tokens

    def correct(self, tenant: str, tokens: float) -> bool:
        """Add (or, negative, take back) what the estimate was off by; returns whether the counter fell.

        If it fell, the lines that the tenant waits in must be told: `LeastFirst.push`.
        """
        self.served[tenant] += tokens
        if tokens < 0:
            self._least.push(tenant)
        return tokens < 0
