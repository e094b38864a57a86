"""What the broker keeps of a request in flight: its bytes, the chunks it has forwarded, its attempts.

Knows nothing of queues or sockets, and never decodes a body.
"""

from __future__ import annotations

import enum
import heapq
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

    __hash__ = object.__hash__  # Enum's own is written in Python, and each request asks four times


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
    model: str  # the model's own name, or `catalogue.LOBBY` while nobody serves what was asked for
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
    quarantined: bool = False  # tried where no other suspect is, so that another death leaves no doubt
    first_started: float | None = None
    tokens: int = 0  # forwarded in this attempt
    prompt_tokens: int = 0  # computed for it, as its outcome says
    size: int = field(default=0)  # bytes kept: request and chunks

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

    def keep_chunk(self, chunk: bytes, tokens: int) -> None:
        """File output of the running attempt. It clears the request of its last death."""
        self.chunks.append(chunk)
        self.tokens += tokens
        self.size += len(chunk)
        self.deaths = 0
        self.quarantined = False

    def note_death(self, max_attempts: int) -> None:
        """Its worker went down with it in hand.

        A stream that was under way goes on at once: most likely it is innocent, and its reader waits. One
        that had said nothing yet, or has said nothing since the last death either, goes into quarantine.
        """
        self.deaths += 1
        self.deaths_in_all += 1
        self.quarantined = self.tokens == 0 or self.deaths >= max_attempts

    def is_poison(self, max_attempts: int, *, alone: bool) -> bool:
        """Whether it has brought down as many workers as it may; `alone`: no other suspect was there.

        Output clears a request of its last death: a worker that is killed for other reasons, twice, must
        not fail it. So that this can't go on for ever, a multiple of the bound holds for all deaths.
        """
        certain = self.deaths >= max_attempts and alone
        return certain or self.deaths > max_attempts or self.deaths_in_all >= POISON_FACTOR * max_attempts

    def move(self, state: State) -> None:
        """Change the state.

        Raises:
            AssertionError: the table doesn't allow it, which is a bug of ours.
        """
        assert state in TRANSITIONS[self.state], f"request {self.number}: {self.state} → {state}"
        self.state = state


@dataclass(slots=True)
class Client:
    """A client with requests in flight."""

    heard: float
    pings: bool = False  # it has pinged once, so it must go on
    jobs: dict[str, Job] = field(default_factory=dict)  # by its own id


class InFlight:
    """All requests in flight, by client, and when they are due to have ended."""

    def __init__(self) -> None:
        self.clients: dict[bytes, Client] = {}
        self.count = 0
        self._deadlines: list[tuple[float, int, Key]] = []  # a heap; entries of ended requests are skipped

    def add(self, job: Job, now: float) -> None:
        """Keep a request; its client has no other of this id."""
        client = self.clients.get(job.client)
        if client is None:
            client = self.clients[job.client] = Client(heard=now)
        assert job.submit.id not in client.jobs, f"{job.key} is in flight already"
        client.jobs[job.submit.id] = job
        self.count += 1
        if len(self._deadlines) > 2 * self.count + 1024:
            self._deadlines = [(other.deadline, other.number, other.key) for other in self.jobs()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (job.deadline, job.number, job.key))

    def remove(self, job: Job) -> None:
        """Forget a request, and its client if this was the last."""
        client = self.clients[job.client]
        del client.jobs[job.submit.id]
        if not client.jobs:
            del self.clients[job.client]
        self.count -= 1

    def find(self, key: Key) -> Job | None:
        """The request that a client calls so."""
        client = self.clients.get(key[0])
        return client.jobs.get(key[1]) if client else None

    def of(self, identity: bytes) -> list[Job]:
        """All requests of a client."""
        client = self.clients.get(identity)
        return list(client.jobs.values()) if client else []

    def count_of(self, identity: bytes) -> int:
        """How many requests a client has in flight."""
        client = self.clients.get(identity)
        return len(client.jobs) if client else 0

    def jobs(self) -> list[Job]:
        """All, in no particular order. O(n)."""
        return [job for client in self.clients.values() for job in client.jobs.values()]

    def overdue(self, now: float) -> list[Job]:
        """Requests whose deadline has passed; each is named once."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, key = heapq.heappop(self._deadlines)
            job = self.find(key)
            if job is not None and job.number == number:
                found.append(job)
        return found

    def silent(self, now: float, seconds: float) -> list[bytes]:
        """Clients that have pinged once and then said nothing for so long."""
        return [who for who, client in self.clients.items() if client.pings and now - client.heard > seconds]
