"""Notices a step that never returns. Knows counters and the time, nothing else."""

from __future__ import annotations

from .exchange import Counters


class Watchdog:
    """Compares the engine's step counter with the time.

    Args:
        counters: the engine's.
        limit_s: how long a step may take.
        now: monotonic seconds.
    """

    def __init__(self, counters: Counters, limit_s: float, now: float) -> None:
        self._counters = counters
        self._limit_s = limit_s
        self._steps = counters.steps
        self._since = now
        self._checked = now

    def hung(self, now: float) -> bool:
        """Whether there has been work and no step for longer than the limit. Due about each second.

        A gap between two checks is our own (the process was stopped), not the engine's.
        """
        gap = now - self._checked
        self._checked = now
        if gap > self._limit_s / 2:
            self._since += gap
        if self._counters.steps != self._steps or not self._counters.running:
            self._steps, self._since = self._counters.steps, now
        return now - self._since > self._limit_s
