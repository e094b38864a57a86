"""What one HTTP request has running in the pool, from its submits to its last answer.

A `Job` is one or more requests of the pool (prompts × n). What the pool says about them comes as plain
calls from the client's socket reader and goes on at once to a formatter and the connection: no queue and no
task lies between. It knows nothing of HTTP's fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from broker.calls import Listener
from broker.errors import LoadOnceError
from broker.protocol import Chunk, Done, Outcome, Request, Submit, merge
from http_frontend.metrics import ModelMetrics
from http_frontend.sse import EventStream, SlowReader


class Pool(Protocol):
    """The part of the broker's client that a job needs."""

    def submit(self, submit: Submit, request: Request, listener: Listener, timeout_s: float) -> None:
        """Send a request; its listener hears the rest, at the latest a failure after `timeout_s`.

        Raises:
            LoadOnceError: it can't even be sent.
        """

    def cancel(self, id: str) -> None:
        """Give it up; its listener hears nothing more."""


class Formatter(Protocol):
    """Makes a stream's events, such as `ChatStream`."""

    def begin(self) -> bytes:
        """What comes first."""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """New output of a choice."""

    def end(self, index: int, outcome: Outcome) -> bytes:
        """A choice has ended."""

    def finish(self) -> bytes:
        """All have ended."""


class Result(msgspec.Struct):
    """One choice, whole."""

    chunk: Chunk
    outcome: Outcome


class _Part:
    """One of the job's requests."""

    def __init__(self, job: Job, index: int, id: str) -> None:
        self.job = job
        self.index = index
        self.id = id
        self.chunks: list[Chunk] = []  # not yet given to a stream, or all of them if nothing streams
        self.outcome: Outcome | None = None
        self.first_s = 0.0
        self.tokens = 0  # heard so far

    def on_chunk(self, chunk: Chunk) -> None:
        try:
            self.job.heard_chunk(self, chunk)
        except Exception as problem:  # noqa: BLE001 - the client's reader serves other requests too
            self.job.fail(problem)

    def on_done(self, done: Done, outcome: Outcome) -> None:
        try:
            self.job.heard_done(self, done, outcome)
        except Exception as problem:  # noqa: BLE001 - as above
            self.job.fail(problem)

    def on_failed(self, problem: LoadOnceError) -> None:
        self.job.fail(problem)


class Job:
    """Requests of the pool that are answered together.

    Whoever makes one must call `close` in the end, whatever happens: that cancels what still runs.

    Args:
        pool: takes the submits.
        clock: seconds, monotonic.
        metrics: of the model.
    """

    def __init__(self, pool: Pool, clock: Callable[[], float], metrics: ModelMetrics) -> None:
        self._pool = pool
        self._clock = clock
        self._metrics = metrics
        self._parts: list[_Part] = []
        self._left = 0
        self._first: asyncio.Future[None] | None = None  # of who waits for the first word
        self._heard = False  # something has come, or it has ended
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream: EventStream | None = None
        self._formatter: Formatter | None = None
        self.problem: Exception | None = None
        self.tokens = 0  # used by the whole request, once it is closed
        self.worker = ""

    def start(self, asked: Sequence[tuple[Submit, Request]], timeout_s: float) -> None:
        """Submit all.

        Raises:
            LoadOnceError: the pool refuses at once.
        """
        self._started = self._clock()
        self._left = len(asked)
        self._streams = asked[0][0].stream
        for index, (submit, request) in enumerate(asked):
            part = _Part(self, index, submit.id)
            self._parts.append(part)
            self._pool.submit(submit, request, part, timeout_s)

    async def results(self) -> list[Result]:
        """Wait for all, whole.

        Raises:
            LoadOnceError: one of them failed.
        """
        await self._ended
        self._raise()
        return [Result(_merged(p.chunks), p.outcome) for p in self._parts if p.outcome is not None]

    async def first(self) -> None:
        """Wait until something has come, so that a refusal can still be a plain answer.

        Raises:
            LoadOnceError: it failed before that.
        """
        if not self._heard and not self._ended.done():
            self._first = asyncio.get_running_loop().create_future()
            await self._first
        self._raise()

    async def stream(self, stream: EventStream, formatter: Formatter) -> None:
        """Send all that has come and will come as events; returns when the stream has ended."""
        self._stream, self._formatter = stream, formatter
        self._send(formatter.begin())
        for part in self._parts:
            chunks, part.chunks = part.chunks, []
            for chunk in chunks:
                self._send(formatter.chunk(part.index, chunk), echoed=_echoes(chunk))
            if part.outcome is not None:
                self._send(formatter.end(part.index, part.outcome))
        if self._left == 0:
            self._end_stream()
        await self._ended

    def close(self) -> None:
        """Cancel what still runs."""
        if self._stream is not None:
            self._stream.drop()
        for part in self._parts:
            if part.outcome is None:
                self.tokens += part.tokens  # who leaves early pays for what was made
                if self._left:
                    self._pool.cancel(part.id)
        self._parts.clear()  # they know us, and we them: without this only the garbage collector ends it

    # ── what the pool says ───────────────────────────────────────────────────────────────────────

    def heard_chunk(self, part: _Part, chunk: Chunk) -> None:
        """New output of a part."""
        if self._ended.done():
            return
        part.tokens += len(chunk.token_ids)
        if not part.first_s:
            part.first_s = self._clock() - self._started
        if self._formatter is not None:
            self._send(self._formatter.chunk(part.index, chunk), echoed=_echoes(chunk))
            return
        part.chunks.append(chunk)
        self._note_first()

    def heard_done(self, part: _Part, done: Done, outcome: Outcome) -> None:
        """A part has ended well."""
        if self._ended.done():
            return
        part.outcome = outcome
        self._left -= 1
        self.worker = done.worker
        self._count(part, done, outcome)
        if self._formatter is not None:
            self._send(self._formatter.end(part.index, outcome))
        if self._left == 0:
            self._end_stream()
            self._wake()
        else:
            self._note_first()

    def fail(self, problem: Exception) -> None:
        """The whole job ends in an error: what still runs is cancelled."""
        if self._ended.done():
            return
        self.problem = problem
        for part in self._parts:
            if part.outcome is None:
                self._pool.cancel(part.id)
        self._left = 0
        if self._stream is not None and not isinstance(problem, SlowReader):
            self._stream.fail(problem)
        self._wake()

    def _count(self, part: _Part, done: Done, outcome: Outcome) -> None:
        now, usage = self._clock() - self._started, outcome.usage
        metrics = self._metrics
        metrics.done(
            seconds=now,
            first_s=(part.first_s or now) if self._streams else None,
            queued_s=done.queued_ms / 1000,
            tokens=usage.completion_tokens,
        )
        metrics.prompt_tokens += usage.prompt_tokens
        metrics.cached_tokens += usage.cached_tokens
        metrics.generated_tokens += usage.completion_tokens
        metrics.finished[outcome.finish_reason] += 1
        self.tokens += usage.prompt_tokens + usage.completion_tokens

    def _send(self, events: bytes, *, echoed: bool = False) -> None:
        if events and self._stream is not None:
            try:
                self._stream.send(events, echoed=echoed)
            except SlowReader as problem:
                self.fail(problem)

    def _end_stream(self) -> None:
        if self._formatter is not None and self._stream is not None:
            self._send(self._formatter.finish())
            try:
                self._stream.end()
            except SlowReader as problem:
                self.fail(problem)
            self._wake()

    def _wake(self) -> None:
        self._note_first()
        if not self._ended.done():
            self._ended.set_result(None)

    def _note_first(self) -> None:
        self._heard = True
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _raise(self) -> None:
        if self.problem is not None:
            raise self.problem


def _echoes(chunk: Chunk) -> bool:
    return chunk.prompt_text is not None or chunk.prompt_logprobs is not None


def _merged(chunks: Sequence[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    return merge(chunks) if chunks else Chunk()
