"""What the worker's two threads say to each other, over two `queue.SimpleQueue`s.

The link thread owns the socket, the engine thread owns the model and the tokenizer. Bodies cross as the
bytes that came from or go to the wire; the link never decodes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from broker.errors import LoadOnceError

# ── link → engine ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Run:
    """Start, or continue, a request."""

    id: str  # the broker's name for this attempt
    request_id: str  # the client's name, for the log
    request: bytes  # a `protocol.Request`
    chunks: tuple[bytes, ...] = ()  # `protocol.Chunk`s that the client already has


@dataclass(frozen=True, slots=True)
class Stop:
    """Forget these requests; nothing more is said about them. Unknown ids are no fault."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quit:
    """Leave `Engine.run`."""


Command = Run | Stop | Quit

# ── engine → link ────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class StepOutput:
    """All that one engine step has to say; an id's chunks come before its end."""

    chunks: list[tuple[str, bytes, int]] = field(default_factory=list)  # id, `Chunk`, tokens in it
    finished: list[tuple[str, bytes]] = field(default_factory=list)  # id, `Outcome`
    failed: list[tuple[str, LoadOnceError]] = field(default_factory=list)
    handed_back: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.finished or self.failed or self.handed_back)


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The last word of the engine thread; the process is to exit non-zero.

    What it had in hand or in its inbox, and was not in the fatal step, has been handed back before. The
    suspects have not: they end with the process, so that the broker counts the attempt against them and a
    poison pill meets its limit.
    """

    reason: str
    suspects: tuple[str, ...] = ()  # ids that were in the step that failed


Output = StepOutput | EngineDied
Emit = Callable[[Output], None]  # called in the engine thread


@dataclass(slots=True)
class Counters:
    """Written by the engine thread, read by the link thread. All but the first four only grow."""

    in_step: tuple[str, ...] = ()  # ids of the requests that are being computed, to blame if it never ends
    running: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
