"""Counters and histograms of the broker, and nothing that decides."""

from __future__ import annotations

import bisect
from collections import Counter
from typing import Final

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Observations in seconds, by bucket."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self.counts)


class Metrics:
    """What the broker counts. Totals only grow while the process lives."""

    def __init__(self) -> None:
        self.submitted = 0
        self.done = 0
        self.tokens = 0
        self.dispatched = 0
        self.continuations = 0  # attempts that began with chunks already delivered
        self.handoffs = 0
        self.worker_deaths = 0
        self.stray = 0  # output of an attempt that was over
        self.unroutable = 0  # messages whose peer had left
        self.malformed = 0
        self.replaced = 0  # requests submitted again while in flight
        self.workers_refused = 0
        self.failed: Counter[str] = Counter()  # by error code
        self.dispatch_wait = Histogram()  # arrival → first worker


class Rate:
    """An exponentially weighted rate per second, with a half-life of five seconds."""

    HALF_LIFE_S: Final = 5.0

    def __init__(self) -> None:
        self.per_second = 0.0
        self._since: float | None = None
        self._count = 0

    def count(self, n: int = 1) -> None:
        """Something happened `n` times."""
        self._count += n

    def tick(self, now: float) -> None:
        """Fold what was counted since the last tick into the rate."""
        if self._since is None:
            self._since = now
            return
        elapsed = now - self._since
        if elapsed <= 0:
            return
        keep: float = 0.5 ** (elapsed / self.HALF_LIFE_S)
        self.per_second = keep * self.per_second + (1 - keep) * self._count / elapsed
        self._since, self._count = now, 0
