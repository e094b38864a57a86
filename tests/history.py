"""Records every event of every request, and finds what must never happen.

Zero or two ends, a gap, a repeat, another request's text, a text that differs from an undisturbed run's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from broker.protocol import Chunk, Done, Outcome


@dataclass
class Record:
    """One request's events, with times in monotonic seconds."""

    id: str
    expected: str | None  # the whole text, if it is known beforehand
    streams: bool
    began: float
    chunks: list[tuple[float, int, int, str]] = field(default_factory=list)  # when, start, tokens, text
    ends: list[tuple[float, str]] = field(default_factory=list)  # when, "done" or an error's code
    given_up: bool = False  # cancelled by its client, so nothing more is expected
    attempts: int = 0
    queued_s: float = 0.0

    @property
    def text(self) -> str:
        """All its text so far."""
        return "".join(text for _, _, _, text in self.chunks)

    @property
    def longest_pause_s(self) -> float:
        """The longest time in which nothing came, from the first chunk to the end."""
        times = [when for when, *_ in self.chunks] + [when for when, _ in self.ends]
        return max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)

    @property
    def latency_s(self) -> float:
        """From begin to end."""
        return self.ends[0][0] - self.began if self.ends else float("nan")


class History:
    """All records of a run."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}

    def begin(self, id: str, expected: str | None, *, streams: bool) -> Record:
        """A request is sent."""
        assert id not in self.records, f"{id} was begun twice"
        self.records[id] = Record(id, expected, streams, time.monotonic())
        return self.records[id]

    def chunk(self, id: str, chunk: Chunk) -> None:
        """Output came."""
        event = (time.monotonic(), chunk.start, len(chunk.token_ids), chunk.text)
        self.records[id].chunks.append(event)

    def done(self, id: str, done: Done, outcome: Outcome) -> None:
        """It ended well."""
        record = self.records[id]
        record.attempts, record.queued_s = done.attempts, done.queued_ms / 1000
        record.ends.append((time.monotonic(), "done"))
        total = sum(tokens for _, _, tokens, _ in record.chunks)
        if outcome.usage.completion_tokens != total:
            record.ends.append((time.monotonic(), f"{total} of {outcome.usage.completion_tokens} tokens"))

    def failed(self, id: str, code: str) -> None:
        """It ended in an error."""
        self.records[id].ends.append((time.monotonic(), code))

    def give_up(self, id: str) -> None:
        """Its client cancelled it."""
        self.records[id].given_up = True

    # ── what is asked of it ──────────────────────────────────────────────────────────────────────

    @property
    def longest_pause_s(self) -> float:
        """The longest pause of any stream."""
        return max((r.longest_pause_s for r in self.records.values() if r.streams), default=0.0)

    def ended_as(self, end: str) -> list[Record]:
        """The records that ended as ``done`` or with a code."""
        return [r for r in self.records.values() if r.ends and r.ends[0][1] == end]

    def faults(self, *, allowed: frozenset[str] = frozenset({"done"})) -> list[str]:
        """Everything that must not have happened, a sentence each.

        Args:
            allowed: how requests may end.
        """
        return [fault for record in self.records.values() for fault in _faults(record, allowed)]

    def check(self, *, allowed: frozenset[str] = frozenset({"done"})) -> None:
        """Fail on the first few faults, if there are any."""
        found = self.faults(allowed=allowed)
        assert not found, f"{len(found)} faults in {len(self.records)} requests: " + "; ".join(found[:5])


def _faults(record: Record, allowed: frozenset[str]) -> list[str]:
    if record.given_up:
        return [] if not record.ends else [f"{record.id} was given up and still ended as {record.ends}"]
    found = []
    if len(record.ends) != 1:
        found.append(f"{record.id} has {len(record.ends)} ends: {[end for _, end in record.ends]}")
    elif record.ends[0][1] not in allowed:
        found.append(f"{record.id} ended as {record.ends[0][1]}")
    due = 0
    for _, start, tokens, _ in record.chunks:
        if start != due:
            found.append(f"{record.id} has a chunk at token {start} where {due} was due")
        due = start + tokens
    well = bool(record.ends) and record.ends[0][1] == "done"
    if well and record.expected is not None and record.text != record.expected:
        found.append(f"{record.id} says {record.text[:60]!r}, expected {record.expected[:60]!r}")
    return found
