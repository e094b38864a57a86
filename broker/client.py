"""`Client` (blocking) and `AsyncClient`: thin shells with the same method names over `calls.Calls`.

    with Client() as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        with client.stream(messages=[{"role": "user", "content": "Hi"}]) as answer:
            for chunk in answer:
                print(chunk.text, end="")

Both may be made before a fork: the socket is opened in the process that first uses the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import zmq

from broker import protocol as p
from broker import wire
from broker.addresses import address as default_address
from broker.calls import Calls, Listener, make_submit
from broker.errors import Cancelled, LoadOnceError, Overloaded, ProtocolError, Unavailable
from broker.requests import Completion, Turn, completion, conversation, generation

TIMEOUT_S: Final = 300.0
TICK_S: Final = 0.25
RECEIVE_S: Final = 0.005  # of reading in a row
BUFFERED_CHUNKS: Final = 10_000  # of one stream that its reader hasn't taken yet

T = TypeVar("T")
Event = p.Chunk | tuple[p.Done, p.Outcome] | LoadOnceError

# Clients of the parent process, kept in a child so that nothing of theirs is closed there.
_of_the_parent: list[object] = []


class _Events:
    """A listener that passes each event to one function, and gives up a reader that is too slow."""

    def __init__(self, put: Callable[[Event], None], waiting: Callable[[], int], cancel: Callable[[], None]):
        self._put = put
        self._waiting = waiting
        self._cancel = cancel

    def on_chunk(self, chunk: p.Chunk) -> None:
        if self._waiting() < BUFFERED_CHUNKS:
            self._put(chunk)
            return
        self._cancel()
        self._put(Overloaded(f"the stream's reader is {BUFFERED_CHUNKS} chunks behind: it was given up"))

    def on_done(self, done: p.Done, outcome: p.Outcome) -> None:
        self._put((done, outcome))

    def on_failed(self, problem: LoadOnceError) -> None:
        self._put(problem)


# ── blocking ─────────────────────────────────────────────────────────────────────────────────────────


class _Loop:
    """The thread that owns one process's socket. Others hand it functions to run on its `Calls`."""

    def __init__(self, address: str, curve_keys: str) -> None:
        self.pid = os.getpid()
        self.calls = Calls(time.monotonic())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = wire.open_dealer(self._context, address, curve_keys)
        self._todo: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        # A daemon, so that a program that forgets `close` still ends.
        self._thread = threading.Thread(target=self._run, name="loadonce-client", daemon=True)
        self._thread.start()

    def do(self, act: Callable[[], None]) -> None:
        """Run a function in the loop's thread, soon."""
        self._todo.append(act)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End all calls and close the socket; what is unsent has a fraction of a second."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._socket.close()
        self._context.term()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closing:
            poller.poll(int(1000 * TICK_S) if self.calls.busy else None)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            while self._todo:
                self._todo.popleft()()
            now = time.monotonic()
            _receive(self._socket, self.calls, now)
            self.calls.tick(now)
            _send(self._socket, self.calls)
        self.calls.fail_all(Cancelled("the client was closed"))
        _send(self._socket, self.calls)


class Stream:
    """One streaming answer: iterate over its chunks; afterwards `outcome` says how it ended.

    Leaving its ``with`` block early cancels the request.
    """

    def __init__(self, events: queue.SimpleQueue[Event], cancel: Callable[[], None], id: str) -> None:
        self.id = id
        self.outcome: p.Outcome | None = None
        self.done: p.Done | None = None
        self._events = events
        self._cancel = cancel

    def __iter__(self) -> Iterator[p.Chunk]:
        while self.outcome is None:
            event = self._events.get()
            if isinstance(event, p.Chunk):
                yield event
            elif isinstance(event, LoadOnceError):
                raise event
            else:
                self.done, self.outcome = event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self.outcome is None:
            self._cancel()


class Client:
    """Blocking client; safe to share between threads, and to make before a fork.

    Args:
        address: the broker's address for clients; empty for the one in the run directory.
        tenant: requests are fair between tenants.
        timeout_s: for calls that name none.
        curve_keys: directory of CURVE keys, for addresses on other hosts.
    """

    def __init__(
        self, address: str = "", *, tenant: str = "", timeout_s: float = TIMEOUT_S, curve_keys: str = ""
    ) -> None:
        self._address = address
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._curve_keys = curve_keys
        self._lock = threading.Lock()
        self._loop: _Loop | None = None
        os.register_at_fork(after_in_child=self._forget)

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        priority: int = 5,
        timeout_s: float | None = None,
        **params: Any,
    ) -> Completion:
        """Go on with a text or with tokens; returns the whole answer.

        Args:
            prompt: the text, or
            token_ids: its tokens.
            model: empty for the pool's default model.
            priority: 0 is served first, 9 last.
            timeout_s: seconds until the request is given up.
            **params: fields of `protocol.Params`, such as max_tokens, temperature, seed, stop.

        Raises:
            InvalidRequest: before anything is sent if it can be known, else by the worker.
            LoadOnceError: as the broker says; see `broker.errors`.
        """
        return self._whole(generation(prompt, token_ids, params), model, priority, timeout_s)

    def chat(
        self,
        messages: Sequence[Turn],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        model: str = "",
        priority: int = 5,
        timeout_s: float | None = None,
        **params: Any,
    ) -> Completion:
        """The next turn of a conversation; arguments and errors as in `generate`."""
        return self._whole(conversation(messages, tools, params), model, priority, timeout_s)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Turn] | None = None,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        model: str = "",
        priority: int = 5,
        timeout_s: float | None = None,
        **params: Any,
    ) -> Stream:
        """As `generate` or `chat`, chunk by chunk."""
        request = (
            generation(prompt, token_ids, params)
            if messages is None
            else conversation(messages, tools, params)
        )
        submit = make_submit(request, model=model, stream=True, tenant=self._tenant, priority=priority)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._begin(submit, request, events, timeout_s)
        return Stream(events, lambda: self._cancel(submit.id), submit.id)

    def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = None) -> list[int]:
        """The tokens of a text."""
        request = p.Request(prompt=text, task="tokenize")
        return self._whole(request, model, 5, timeout_s).token_ids

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None) -> str:
        """The text of tokens."""
        request = p.Request(token_ids=list(token_ids), task="detokenize")
        return self._whole(request, model, 5, timeout_s).text

    def models(self, timeout_s: float = 5.0) -> list[p.ModelInfo]:
        """Every model that was served since the broker started.

        Raises:
            Unavailable: no broker answers.
        """
        heard: queue.SimpleQueue[p.Models] = queue.SimpleQueue()
        loop = self._running()
        loop.do(lambda: loop.calls.list_models(heard.put))
        try:
            return heard.get(timeout=timeout_s).models
        except queue.Empty:
            raise Unavailable("no broker answers") from None

    def wait_ready(self, timeout_s: float = 60.0, model: str = "") -> None:
        """Wait until a worker can serve.

        Raises:
            Unavailable: none could within the time.
        """
        until = time.monotonic() + timeout_s
        while not _served(self._models_or_none(max(0.05, min(1.0, until - time.monotonic()))), model):
            if time.monotonic() >= until:
                raise Unavailable(f"no worker was ready within {timeout_s:g} s")
            time.sleep(0.05)

    def close(self) -> None:
        """Give up what is in flight and close the socket. The client may be used again."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── within ───────────────────────────────────────────────────────────────────────────────────

    def _whole(self, request: p.Request, model: str, priority: int, timeout_s: float | None) -> Completion:
        submit = make_submit(request, model=model, tenant=self._tenant, priority=priority)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._begin(submit, request, events, timeout_s)
        chunks: list[p.Chunk] = []
        try:
            while True:
                event = events.get()
                if isinstance(event, p.Chunk):
                    chunks.append(event)
                elif isinstance(event, LoadOnceError):
                    raise event
                else:
                    return completion(chunks, *event)
        except KeyboardInterrupt:
            self._cancel(submit.id)
            raise

    def _begin(
        self, submit: p.Submit, request: p.Request, events: queue.SimpleQueue[Event], timeout_s: float | None
    ) -> None:
        loop = self._running()
        seconds = self._timeout_s if timeout_s is None else timeout_s
        listener = _Events(events.put, events.qsize, lambda: self._cancel(submit.id))

        def begin() -> None:
            try:
                loop.calls.submit(submit, request, listener, time.monotonic(), seconds)
            except LoadOnceError as problem:
                events.put(problem)

        loop.do(begin)

    def _cancel(self, id: str) -> None:
        loop = self._loop
        if loop is not None and loop.pid == os.getpid():
            loop.do(lambda: loop.calls.cancel(id))

    def _models_or_none(self, timeout_s: float) -> list[p.ModelInfo]:
        with contextlib.suppress(Unavailable):
            return self.models(timeout_s)
        return []

    def _running(self) -> _Loop:
        with self._lock:
            if self._loop is None:
                self._loop = _Loop(self._address or default_address("clients"), self._curve_keys)
            return self._loop

    def _forget(self) -> None:
        """In a forked child: the parent's socket and thread aren't ours; a lock held there isn't either."""
        self._lock = threading.Lock()
        if self._loop is not None:
            _of_the_parent.append(self._loop)
            self._loop = None


# ── asyncio ──────────────────────────────────────────────────────────────────────────────────────────


class AsyncStream:
    """One streaming answer: iterate over its chunks with ``async for``; `outcome` says how it ended."""

    def __init__(self, cancel: Callable[[], None], id: str) -> None:
        self.id = id
        self.outcome: p.Outcome | None = None
        self.done: p.Done | None = None
        self._cancel = cancel
        self._events: deque[Event] = deque()
        self._came = asyncio.Event()

    def put(self, event: Event) -> None:
        """Hand it an event."""
        self._events.append(event)
        self._came.set()

    def waiting(self) -> int:
        """Events that its reader hasn't taken yet."""
        return len(self._events)

    async def __aiter__(self) -> AsyncIterator[p.Chunk]:
        while self.outcome is None:
            while not self._events:
                self._came.clear()
                await self._came.wait()
            event = self._events.popleft()
            if isinstance(event, p.Chunk):
                yield event
            elif isinstance(event, LoadOnceError):
                raise event
            else:
                self.done, self.outcome = event

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.outcome is None:
            self._cancel()


class AsyncClient:
    """Client for asyncio (or uvloop); one per event loop, arguments as those of `Client`.

    Reads the socket by its file descriptor, without a task per message. `submit` and `cancel` are the
    lower level that the HTTP frontend uses.
    """

    def __init__(
        self, address: str = "", *, tenant: str = "", timeout_s: float = TIMEOUT_S, curve_keys: str = ""
    ) -> None:
        self._address = address
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._curve_keys = curve_keys
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pump_due = False
        self._pid = 0
        self._calls = Calls(0.0)

    # ── lower level ──────────────────────────────────────────────────────────────────────────────

    def submit(
        self, submit: p.Submit, request: p.Request, listener: Listener, timeout_s: float | None = None
    ) -> None:
        """Begin a call; its listener is called in the event loop.

        Raises:
            InvalidRequest: the id is in use, text isn't valid Unicode, or the request is too large.
        """
        self._open()
        seconds = timeout_s if timeout_s is not None else submit.deadline_ms / 1000 or self._timeout_s
        self._calls.submit(submit, request, listener, time.monotonic(), seconds)
        self._pump_soon()

    def cancel(self, id: str) -> None:
        """Give a call up; its listener hears nothing more."""
        if self._socket is not None:
            self._calls.cancel(id)
            self._pump_soon()

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    async def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        priority: int = 5,
        timeout_s: float | None = None,
        **params: Any,
    ) -> Completion:
        """As `Client.generate`; cancelling the awaiting task cancels the request."""
        return await self._whole(generation(prompt, token_ids, params), model, priority, timeout_s)

    async def chat(
        self,
        messages: Sequence[Turn],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        model: str = "",
        priority: int = 5,
        timeout_s: float | None = None,
        **params: Any,
    ) -> Completion:
        """As `Client.chat`; cancelling the awaiting task cancels the request."""
        return await self._whole(conversation(messages, tools, params), model, priority, timeout_s)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Turn] | None = None,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        model: str = "",
        priority: int = 5,
        timeout_s: float | None = None,
        **params: Any,
    ) -> AsyncStream:
        """As `Client.stream`, with ``async with`` and ``async for``."""
        request = (
            generation(prompt, token_ids, params)
            if messages is None
            else conversation(messages, tools, params)
        )
        submit = make_submit(request, model=model, stream=True, tenant=self._tenant, priority=priority)
        stream = AsyncStream(lambda: self.cancel(submit.id), submit.id)
        listener = _Events(stream.put, stream.waiting, lambda: self.cancel(submit.id))
        self.submit(submit, request, listener, timeout_s)
        return stream

    async def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = None) -> list[int]:
        """The tokens of a text."""
        request = p.Request(prompt=text, task="tokenize")
        return (await self._whole(request, model, 5, timeout_s)).token_ids

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None
    ) -> str:
        """The text of tokens."""
        request = p.Request(token_ids=list(token_ids), task="detokenize")
        return (await self._whole(request, model, 5, timeout_s)).text

    async def models(self, timeout_s: float = 5.0) -> list[p.ModelInfo]:
        """As `Client.models`."""
        loop = self._open()
        heard: asyncio.Future[p.Models] = loop.create_future()
        self._calls.list_models(lambda models: None if heard.done() else heard.set_result(models))
        self._pump_soon()
        try:
            return (await asyncio.wait_for(heard, timeout_s)).models
        except TimeoutError:
            raise Unavailable("no broker answers") from None

    async def wait_ready(self, timeout_s: float = 60.0, model: str = "") -> None:
        """As `Client.wait_ready`."""
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(Unavailable):
                if _served(await self.models(max(0.05, min(1.0, until - time.monotonic()))), model):
                    return
            if time.monotonic() >= until:
                raise Unavailable(f"no worker was ready within {timeout_s:g} s")
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Give up what is in flight and close the socket. The client may be used again."""
        if self._socket is None or self._pid != os.getpid():
            return
        self._calls.fail_all(Cancelled("the client was closed"))
        _send(self._socket, self._calls)
        assert self._loop is not None and self._context is not None
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()
        self._context.term()
        self._socket = self._context = self._timer = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # ── within ───────────────────────────────────────────────────────────────────────────────────

    async def _whole(
        self, request: p.Request, model: str, priority: int, timeout_s: float | None
    ) -> Completion:
        submit = make_submit(request, model=model, tenant=self._tenant, priority=priority)
        answer = _Whole(self._open().create_future())
        self.submit(submit, request, answer, timeout_s)
        try:
            return await answer.future
        except asyncio.CancelledError:
            self.cancel(submit.id)
            raise

    def _open(self) -> asyncio.AbstractEventLoop:
        """The running loop, with the socket open in it."""
        loop = asyncio.get_running_loop()
        if self._socket is not None and self._pid == os.getpid() and self._loop is loop:
            return loop
        if self._socket is not None and self._pid == os.getpid():
            self.close()  # of a loop that was before, as with several `asyncio.run`
        elif self._socket is not None:
            _of_the_parent.append((self._socket, self._context))
        self._context = zmq.Context()
        self._socket = wire.open_dealer(
            self._context, self._address or default_address("clients"), self._curve_keys
        )
        self._pid, self._loop = os.getpid(), loop
        self._calls = Calls(time.monotonic())
        self._pump_due = False
        loop.add_reader(self._socket.fileno(), self._pump)
        self._timer = loop.call_later(TICK_S, self._tick)
        return loop

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._calls.tick(time.monotonic())
        self._pump()

    def _pump_soon(self) -> None:
        """Send and receive when the loop is through with what it has: many submits, one turn of the pump."""
        assert self._loop is not None
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        socket, until = self._socket, time.monotonic() + RECEIVE_S
        # The descriptor tells of a change once, and sending may use that up: what counts is EVENTS, at the
        # very end. Asking is cheaper than finding nothing, which raises.
        while socket is not None:
            _send(socket, self._calls)
            if not wire.readable(socket):
                return
            now = time.monotonic()
            if now >= until:
                self._pump_soon()
                return
            _receive_one(socket, self._calls, now)
            socket = self._socket  # a listener may have closed the client


class _Whole:
    """The listener of a call that is answered at once."""

    def __init__(self, future: asyncio.Future[Completion]) -> None:
        self.future = future
        self._chunks: list[p.Chunk] = []

    def on_chunk(self, chunk: p.Chunk) -> None:
        self._chunks.append(chunk)

    def on_done(self, done: p.Done, outcome: p.Outcome) -> None:
        if not self.future.done():
            self.future.set_result(completion(self._chunks, done, outcome))

    def on_failed(self, problem: LoadOnceError) -> None:
        if not self.future.done():
            self.future.set_exception(problem)


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────


def _receive(socket: zmq.Socket[bytes], calls: Calls, now: float) -> None:
    """Read what has come, for `RECEIVE_S` at the most: others wait for this thread, or this loop, too.

    What can't be decoded is dropped: the call's own timeout covers it.
    """
    until = now + RECEIVE_S
    while time.monotonic() < until and wire.readable(socket):
        _receive_one(socket, calls, now)


def _receive_one(socket: zmq.Socket[bytes], calls: Calls, now: float) -> None:
    with contextlib.suppress(zmq.Again, ProtocolError):
        calls.on_message(wire.receive(socket), now)


def _send(socket: zmq.Socket[bytes], calls: Calls) -> None:
    """Send all that is due. What finds no room is lost here and sent again after the next ping."""
    for frames in calls.take():
        with contextlib.suppress(zmq.Again):
            wire.send(socket, frames)


def _served(models: Sequence[p.ModelInfo], model: str) -> bool:
    return any(m.workers and (not model or model == m.name or model in m.aliases) for m in models)
