"""Who hears about a call in both clients: the reader of a stream, or one who waits for the whole answer.

Neither knows of threads or event loops: each hands on what it hears through a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from broker import protocol as p
from broker.errors import LoadOnceError, Overloaded
from broker.requests import Completion, completion

BUFFERED_CHUNKS: Final = 10_000  # of one stream that its reader hasn't taken yet

Event = p.Chunk | tuple[p.Done, p.Outcome] | LoadOnceError


class Reader:
    """Passes a stream's events to one function, and gives up a reader that is too slow.

    Args:
        put: takes each event; the last is the outcome or an error.
        waiting: how many the reader hasn't taken yet.
        cancel: gives the call up.
        most: chunks that may wait, at least 1. Past it the stream ends in `Overloaded`: the broker can't be
            told to wait, and others share the socket.
    """

    def __init__(
        self, put: Callable[[Event], None], waiting: Callable[[], int], cancel: Callable[[], None], most: int
    ) -> None:
        self._put = put
        self._waiting = waiting
        self._cancel = cancel
        self._most = most
        self._given_up = False

    def on_chunk(self, chunk: p.Chunk) -> None:
        """Hand it on, or give the reader up."""
        if self._waiting() < self._most:
            self._hand_on(chunk)
        elif not self._given_up:
            self._cancel()
            self._put(Overloaded(f"the stream's reader is {self._most} chunks behind: it was given up"))
            self._given_up = True

    def on_done(self, done: p.Done, outcome: p.Outcome) -> None:
        """Hand it on."""
        self._hand_on((done, outcome))

    def on_failed(self, problem: LoadOnceError) -> None:
        """Hand it on."""
        self._hand_on(problem)

    def _hand_on(self, event: Event) -> None:
        if not self._given_up:
            self._put(event)


class Whole:
    """Collects an answer and hands it on at once, however many chunks it has, or the error in its place."""

    def __init__(self, settle: Callable[[Completion | LoadOnceError], None]) -> None:
        self._settle = settle
        self._chunks: list[p.Chunk] = []

    def on_chunk(self, chunk: p.Chunk) -> None:
        """Keep it."""
        self._chunks.append(chunk)

    def on_done(self, done: p.Done, outcome: p.Outcome) -> None:
        """Make one of all."""
        self._settle(completion(self._chunks, done, outcome))

    def on_failed(self, problem: LoadOnceError) -> None:
        """Hand it on."""
        self._settle(problem)


def served(models: Sequence[p.ModelInfo], model: str) -> bool:
    """Whether a worker can serve the model now; any model, if it is empty."""
    return any(m.workers and (not model or model == m.name or model in m.aliases) for m in models)
