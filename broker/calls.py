"""The client's side of the protocol, without a socket: calls in flight, chunks received, what to send again.

Worn by `Client` and `AsyncClient` alike. The caller hands in each message from the broker and the time, and
sends what `take` returns, in order. Each call ends exactly once: its listener hears chunks in order and
without gap or repeat, then `on_done` or `on_failed`; after `cancel` it hears nothing.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import msgspec

from broker import protocol as p
from broker.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LoadOnceError,
    ProtocolError,
    from_validation,
)

PREFIX_BLOCK_BYTES: Final = 512
TOKENS_GUESSED: Final = 256  # output of a request that names no max_tokens
BYTES_PER_TOKEN: Final = 4
MERGED: Final = 256  # chunks kept as one; with p.MAX_CLIENT_FRAMES, a million tokens can be sent again
RESEND_S: Final = 1.0  # a gap is answered by one new submit a second, at the most
INCOMPLETE_AT_MOST: Final = 3
QUIET_S: Final = 10.0  # a broker silent for so long is pinged more rarely, so that pings don't pile up
QUIET_PING_S: Final = 5.0
LONGEST_S: Final = (
    4e9  # a timeout past this one, infinity too, counts as this: `p.Milliseconds` ends soon after
)


class Listener(Protocol):
    """Who hears about one call. Its methods must return soon and not raise."""

    def on_chunk(self, chunk: p.Chunk) -> None:
        """New output; for a call that doesn't stream, all of it, just before `on_done`."""

    def on_done(self, done: p.Done, outcome: p.Outcome) -> None:
        """It ended well."""

    def on_failed(self, problem: LoadOnceError) -> None:
        """It ended in an error."""


T = TypeVar("T")
ModelsHeard = Callable[[p.Models | LoadOnceError], None]


@dataclass(slots=True, eq=False)
class _Call:
    submit: p.Submit
    request: bytes
    listener: Listener
    gives_up: float  # monotonic seconds
    stamp: int  # pings with a greater stamp were sent after the latest submit
    sent: float
    counted: bool  # its outcome says how many tokens must have come
    tokens: int = 0  # received
    incomplete: int = 0  # how often output was missing at its end, or couldn't be read
    chunks: list[bytes] = field(default_factory=list)  # as they came
    merged: list[bytes] = field(default_factory=list)  # what was before these, `MERGED` chunks in each

    def keep(self, chunk: p.Chunk, frame: bytes) -> None:
        """Note what was received, in a tenth of the memory that decoded chunks would take."""
        self.tokens += len(chunk.token_ids)
        self.chunks.append(frame)
        if len(self.chunks) >= MERGED:
            self.merge()

    def merge(self) -> None:
        """Make one frame of the latest ones."""
        if self.chunks:
            self.merged.append(p.encode(p.merge([p.chunk_body.decode(frame) for frame in self.chunks])))
            self.chunks = []


class Calls:
    """All calls of one client.

    Args:
        now: monotonic seconds, as in all methods.
    """

    def __init__(self, now: float) -> None:
        self.session = ""
        self.resubmitted = 0
        self._calls: dict[str, _Call] = {}
        self._model_waiters: list[ModelsHeard] = []
        self._stamp = 0
        self._pinged = now
        self._heard = now
        self._out: list[list[bytes]] = []

    @property
    def pending(self) -> int:
        """Calls that haven't ended."""
        return len(self._calls)

    @property
    def busy(self) -> bool:
        """Whether `tick` is due: something is waited for."""
        return bool(self._calls or self._model_waiters)

    def take(self) -> list[list[bytes]]:
        """Messages to send, in order; the caller owns them now."""
        out, self._out = self._out, []
        return out

    # ── what the user wants ──────────────────────────────────────────────────────────────────────

    def submit(
        self, submit: p.Submit, request: p.Request, listener: Listener, now: float, timeout_s: float
    ) -> None:
        """Begin a call. A request without a seed gets one, so that any worker can continue it.

        Raises:
            InvalidRequest: the id is in use, a field of the header or the timeout is out of its bounds,
                text isn't valid Unicode, or the request is too large. Nothing was begun.
        """
        if submit.id in self._calls:
            raise InvalidRequest(f"id: {submit.id!r} is in flight already", param="id")
        timeout_s = bounded_timeout(timeout_s)
        body = encode_request(request)
        submit = msgspec.structs.replace(submit, deadline_ms=max(1, int(1000 * timeout_s)))
        header = encode_submit(submit)
        if not self.busy:
            self._pinged = self._heard = now
        counted = request.task == "generate"
        call = _Call(submit, body, listener, now + timeout_s, self._stamp, now, counted)
        self._calls[submit.id] = call
        self._out.append([header, body])

    def cancel(self, id: str) -> None:
        """Give a call up; its listener hears nothing more. An id that has ended is no fault."""
        if self._calls.pop(id, None) is not None:
            self._out.append([p.encode(p.Cancel(id=id))])

    def list_models(self, heard: ModelsHeard) -> None:
        """Ask which models there are; `heard` gets the answer, or the error that ends all calls."""
        self._model_waiters.append(heard)
        self._out.append([p.encode(p.ListModels())])

    def forget_models(self, heard: ModelsHeard) -> None:
        """Stop waiting for an answer to `list_models`."""
        if heard in self._model_waiters:
            self._model_waiters.remove(heard)

    # ── what the broker says ─────────────────────────────────────────────────────────────────────

    def on_message(self, frames: Sequence[bytes], now: float) -> None:
        """A message from the broker. What can't be read of one call's output is asked for again.

        Raises:
            ProtocolError: its header can't be decoded; nothing was changed.
        """
        _, header, body = p.split(frames)
        message = p.decode_header(p.to_client, header)
        self._heard = now
        match message:
            case p.Chunks():
                for id, frame in zip(message.ids, body, strict=False):
                    self._on_chunk(id, frame, now)
            case p.Done():
                self._on_done(message, body, now)
            case p.Failed():
                self._on_failed(message)
            case p.Pong():
                self._on_pong(message, now)
            case p.Models():
                self._tell_models(message)

    def _on_chunk(self, id: str, frame: bytes, now: float) -> None:
        call = self._calls.get(id)
        if call is None:
            return
        try:
            chunk = _decode(p.chunk_body, frame)
        except ProtocolError as problem:
            self._on_incomplete(call, now, str(problem))
            return
        if chunk.start > call.tokens:
            self._fill_gap(call, now)
        elif chunk.start == call.tokens:
            call.keep(chunk, frame)
            call.listener.on_chunk(chunk)

    def _tell_models(self, answer: p.Models | LoadOnceError) -> None:
        """One answer is for all who wait: had it an asker, an answer lost would shift all later ones."""
        waiters, self._model_waiters = self._model_waiters, []
        for heard in waiters:
            heard(answer)

    def _on_done(self, message: p.Done, body: Sequence[bytes], now: float) -> None:
        call = self._calls.get(message.id)
        if call is None:
            return
        try:
            if not body:
                raise ProtocolError("done without an outcome")
            outcome = _decode(p.outcome_body, body[0])
        except ProtocolError as problem:
            self._on_incomplete(call, now, str(problem))
            return
        if not call.submit.stream:
            before = call.incomplete
            for frame in body[1:]:
                self._on_chunk(message.id, frame, now)
                if call.incomplete != before:
                    return  # a chunk couldn't be read, and the call has been dealt with
        if self._calls.get(message.id) is not call:
            return  # its listener has given it up
        if call.counted and call.tokens != outcome.usage.completion_tokens:
            self._on_incomplete(call, now, "tokens were missing")
            return
        del self._calls[message.id]
        call.listener.on_done(message, outcome)

    def _on_failed(self, message: p.Failed) -> None:
        call = self._calls.pop(message.id, None)
        if call is not None:
            call.listener.on_failed(message.exception())
        elif not message.id:
            # About a message that the broker could not take, such as one of another version: whichever
            # it was, nothing that we wait for will come.
            self.fail_all(message.exception())

    def _on_pong(self, message: p.Pong, now: float) -> None:
        self.session = message.session
        for id in message.unknown:
            call = self._calls.get(id)
            if call is not None and message.stamp > call.stamp:
                self._submit_again(call, now)

    def _fill_gap(self, call: _Call, now: float) -> None:
        """Output is missing: start over from what was received."""
        if now - call.sent >= RESEND_S:
            self._submit_again(call, now)

    def _on_incomplete(self, call: _Call, now: float, why: str) -> None:
        """Some of it was lost on the way or can't be read; more than a few times can't be chance."""
        call.incomplete += 1
        if call.incomplete <= INCOMPLETE_AT_MOST:
            self._submit_again(call, now)
            return
        self.cancel(call.submit.id)
        call.listener.on_failed(InternalError(f"The answer came damaged again and again; at last: {why}."))

    def _submit_again(self, call: _Call, now: float) -> None:
        self.resubmitted += 1
        left_ms = max(1, int(1000 * (call.gives_up - now)))
        call.submit = msgspec.structs.replace(call.submit, deadline_ms=left_ms)
        call.sent, call.stamp = now, self._stamp
        call.merge()
        self._out.append([p.encode(call.submit), call.request, *call.merged])

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> None:
        """Let time pass: pings and timeouts. Due about four times a second while `busy`."""
        for id, call in list(self._calls.items()):
            if now >= call.gives_up:
                self.cancel(id)
                why = "The request was given up: its timeout has passed and no answer has come."
                call.listener.on_failed(DeadlineExceeded(why))
        interval = p.BEAT_INTERVAL_S if now - self._heard < QUIET_S else QUIET_PING_S
        if self._calls and now - self._pinged >= interval:
            self._pinged = now
            self._stamp += 1
            ids = list(self._calls)
            for first in range(0, len(ids), p.MAX_IDS):
                ping = p.Ping(pending=ids[first : first + p.MAX_IDS], stamp=self._stamp)
                self._out.append([p.encode(ping)])

    def fail_all(self, problem: LoadOnceError) -> None:
        """End every call: the client is closed, or the broker doesn't take what we say."""
        calls, self._calls = self._calls, {}
        self._tell_models(problem)
        for id, call in calls.items():
            self._out.append([p.encode(p.Cancel(id=id))])
            call.listener.on_failed(problem)


# ── what goes into a submit ──────────────────────────────────────────────────────────────────────────


def new_id() -> str:
    """A name that nobody else has: 128 random bits."""
    return secrets.token_hex(16)


def new_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(63)


def bounded_timeout(timeout_s: float) -> float:
    """The timeout in seconds, at most `LONGEST_S`; one below zero has passed already.

    Raises:
        InvalidRequest: it is no number.
    """
    if not isinstance(timeout_s, int | float) or (isinstance(timeout_s, float) and math.isnan(timeout_s)):
        raise InvalidRequest(
            f"timeout_s: a number of seconds is needed, not {timeout_s!r}", param="timeout_s"
        )
    return max(0.0, min(timeout_s, LONGEST_S))


def encode_submit(submit: p.Submit) -> bytes:
    """The header as a frame, its fields within the bounds that the broker holds them to.

    The broker can't say which request a header that it refuses belongs to, so it must not get one.

    Raises:
        InvalidRequest: names the field.
    """
    try:
        header = p.encode(submit)
        p.from_client.decode(header)
    except UnicodeEncodeError:
        raise InvalidRequest("id, model and tenant must be valid Unicode (half a surrogate pair)") from None
    except (OverflowError, TypeError) as problem:
        raise InvalidRequest(f"the request's header can't be sent: {problem}") from None
    except msgspec.ValidationError as problem:
        raise from_validation(problem) from None
    return header


def encode_request(request: p.Request) -> bytes:
    """The request as a body frame, a seed added if it has none.

    Raises:
        InvalidRequest: text isn't valid Unicode (a lone surrogate), something in it has no place in a
            message, or the whole is past the limit.
    """
    if request.params.seed is None:
        params = msgspec.structs.replace(request.params, seed=new_seed())
        request = msgspec.structs.replace(request, params=params)
    try:
        body = p.encode(request)
    except UnicodeEncodeError:
        raise InvalidRequest(
            "the request holds text that is not valid Unicode (half a surrogate pair)"
        ) from None
    except (OverflowError, RecursionError):
        raise InvalidRequest("the request holds an integer past 64 bits, or is nested too deeply") from None
    except TypeError as problem:
        raise InvalidRequest(f"the request holds what can't be sent: {problem}") from None
    if len(body) > p.MAX_FRAME_BYTES:
        raise InvalidRequest(f"the request has {len(body)} bytes, at most {p.MAX_FRAME_BYTES} are allowed")
    return body


def text_bytes(request: p.Request) -> bytes:
    """What the request's tokens will be made of, near enough to tell equal beginnings apart."""
    if request.prompt is not None:
        return request.prompt.encode(errors="replace")
    if request.token_ids is not None:
        return b"".join((id & 0xFFFFFFFF).to_bytes(4, "little") for id in request.token_ids)
    turns = request.messages or []
    return "\0".join(f"{turn.role}\1{turn.text}" for turn in turns).encode(errors="replace")


def prefix_hashes(text: bytes) -> list[int]:
    """Chained hashes of the full blocks at its beginning: equal hashes mean equal beginnings.

    Each is 62 bits of BLAKE2b over the block and the hash before it.
    """
    hashes: list[int] = []
    before = b""
    for first in range(0, min(len(text), p.MAX_PREFIX_BLOCKS * PREFIX_BLOCK_BYTES), PREFIX_BLOCK_BYTES):
        block = text[first : first + PREFIX_BLOCK_BYTES]
        if len(block) < PREFIX_BLOCK_BYTES:
            break
        before = hashlib.blake2b(block, digest_size=8, key=before).digest()
        hashes.append(int.from_bytes(before, "little") >> 2)
    return hashes


def estimate_cost(request: p.Request, text: bytes) -> int:
    """Tokens that the request may need: prompt by its bytes, output by its max_tokens."""
    prompt = len(request.token_ids) if request.token_ids is not None else len(text) // BYTES_PER_TOKEN
    limit = request.params.max_tokens
    return 1 + prompt + (TOKENS_GUESSED if limit is None else limit)


def make_submit(request: p.Request, *, id: str = "", model: str = "", stream: bool = False,
                tenant: str = "", priority: int = 5) -> p.Submit:  # fmt: skip
    """The header for a request: a fresh id, its prefix hashes and its estimated cost."""
    text = text_bytes(request)
    return p.Submit(
        id=id or new_id(), model=model, stream=stream, tenant=tenant, priority=priority,
        cost=estimate_cost(request, text), prefix=prefix_hashes(text),
    )  # fmt: skip


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as problem:
        raise ProtocolError(f"a body can't be decoded: {problem}") from None
