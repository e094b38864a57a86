"""What the broker keeps of a request in flight: its bytes, the chunks it has forwarded, its attempts.

Knows nothing of queues or sockets, and never decodes a body.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from broker.protocol import Submit

POISON_FACTOR: Final = 8

Key = tuple[bytes, str]  # the client's routing id, the client's name for the request


class State(enum.Enum):
    """Where a request is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


#: What may follow what. A request in flight is queued or running; an ended one is forgotten.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.ENDED}),
    State.RUNNING: frozenset({State.QUEUED, State.ENDED}),
    State.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Job:
    """One request in flight. All times are monotonic seconds, as the scheduler is told them."""

    key: Key
    number: int  # unique while the broker lives
    submit: Submit
    model: str  # resolved: the model's own name, or what was asked for while nobody serves it
    request: bytes
    chunks: list[bytes]
    arrived: float
    deadline: float
    delimited: bool  # answer with an empty delimiter
    state: State = State.QUEUED
    worker: bytes = b""  # the running worker's routing id
    work_id: str = ""  # this attempt's name
    dispatches: int = 0
    deaths: int = 0  # workers that went down with it, one after the other, without output between
    deaths_in_all: int = 0
    first_started: float | None = None
    tokens: int = 0  # forwarded in this attempt
    size: int = field(default=0)

    def __post_init__(self) -> None:
        self.size = len(self.request) + sum(map(len, self.chunks))

    @property
    def client(self) -> bytes:
        """The routing id of the client that waits for it."""
        return self.key[0]

    @property
    def begun(self) -> bool:
        """Whether a worker has ever had it."""
        return self.dispatches > 0 or bool(self.chunks)

    @property
    def suspect(self) -> bool:
        """Whether it may be what brought its last worker down: nothing has come out of it since."""
        return self.deaths > 0

    def note_death(self) -> None:
        """Its worker went down with it in hand."""
        self.deaths += 1
        self.deaths_in_all += 1

    def is_poison(self, max_attempts: int) -> bool:
        """Whether it has brought down as many workers as it may.

        Output clears a request of its last death: a worker that is killed for other reasons, twice, must
        not fail it. So that this can't go on for ever, a multiple of the bound holds for all deaths.
        """
        return self.deaths >= max_attempts or self.deaths_in_all >= POISON_FACTOR * max_attempts

    def move(self, state: State) -> None:
        """Change the state.

        Raises:
            AssertionError: the table doesn't allow it, which is a bug of ours.
        """
        assert state in TRANSITIONS[self.state], f"request {self.number}: {self.state} → {state}"
        self.state = state
