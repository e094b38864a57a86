"""A clock that moves only when a test says so."""

from __future__ import annotations


class Clock:
    """Monotonic seconds; starts far from zero, so that nothing leans on zero."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> float:
        """Let time pass; returns the new time."""
        assert seconds >= 0, f"a monotonic clock doesn't go back {seconds} s"
        self.now += seconds
        return self.now
