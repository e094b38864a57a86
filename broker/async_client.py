"""`AsyncClient`: the client for asyncio and uvloop, a thin shell over `calls.Calls`. Imported from `client`.

Reads the socket by its file descriptor. Its methods are named as those of `Client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import zmq

from broker import protocol as p
from broker import wire
from broker.addresses import address as default_address
from broker.calls import Calls, Listener, make_submit
from broker.errors import Cancelled, LoadOnceError, Unavailable
from broker.frames import readable
from broker.listeners import BUFFERED_CHUNKS, Event, Reader, Whole, served
from broker.requests import Completion, Turn, conversation, detokenization, generation, tokenization

TIMEOUT_S: Final = 300.0
TICK_S: Final = 0.25

T = TypeVar("T")

# Sockets of the parent process, kept in a child so that nothing of theirs is closed there.
_of_the_parent: list[object] = []


class AsyncStream:
    """One streaming answer: iterate over its chunks with ``async for``; `outcome` says how it ended."""

    def __init__(self, cancel: Callable[[], None], id: str) -> None:
        self.id = id
        self.outcome: p.Outcome | None = None
        self.done: p.Done | None = None
        self._problem: LoadOnceError | None = None
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

    def cancel(self) -> None:
        """Give it up, if it hasn't ended; who still reads gets what has come and then `Cancelled`."""
        if self.outcome is None and self._problem is None:
            self._cancel()
            self.put(Cancelled("the stream was left"))

    async def __aiter__(self) -> AsyncIterator[p.Chunk]:
        while self.outcome is None:
            if self._problem is not None:
                raise self._problem
            while not self._events:
                self._came.clear()
                await self._came.wait()
            event = self._events.popleft()
            if isinstance(event, p.Chunk):
                yield event
                continue
            self.put(event)  # the end is for every reader
            if isinstance(event, LoadOnceError):
                self._problem = event
            else:
                self.done, self.outcome = event

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncClient:
    """Client for asyncio (or uvloop); one per event loop, arguments as those of `Client`.

    Reads the socket by its file descriptor, without a task per message. `submit` and `cancel` are the
    lower level that the HTTP frontend uses.
    """

    def __init__(
        self,
        address: str = "",
        *,
        tenant: str = "",
        timeout_s: float = TIMEOUT_S,
        curve_keys: str = "",
        buffered_chunks: int = BUFFERED_CHUNKS,
    ) -> None:
        self._address = address
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._curve_keys = curve_keys
        self._buffered_chunks = buffered_chunks
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
            InvalidRequest: as in `Calls.submit`.
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
        give_up = lambda: self.cancel(submit.id)
        listener = Reader(stream.put, stream.waiting, give_up, self._buffered_chunks)
        self.submit(submit, request, listener, timeout_s)
        return stream

    async def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = None) -> list[int]:
        """The tokens of a text."""
        request = tokenization(text)
        return (await self._whole(request, model, 5, timeout_s)).token_ids

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None
    ) -> str:
        """The text of tokens."""
        request = detokenization(token_ids)
        return (await self._whole(request, model, 5, timeout_s)).text

    async def models(self, timeout_s: float = 5.0) -> list[p.ModelInfo]:
        """As `Client.models`."""
        loop = self._open()
        heard: asyncio.Future[p.Models | LoadOnceError] = loop.create_future()
        hear = functools.partial(_settle, heard)
        self._calls.list_models(hear)
        self._pump_soon()
        try:
            answer = await asyncio.wait_for(heard, timeout_s)
        except TimeoutError:
            raise Unavailable("no broker answers") from None
        finally:
            self._calls.forget_models(hear)
        if isinstance(answer, LoadOnceError):
            raise answer
        return answer.models

    async def wait_ready(self, timeout_s: float = 60.0, model: str = "") -> None:
        """As `Client.wait_ready`."""
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(Unavailable):
                if served(await self.models(max(0.05, min(1.0, until - time.monotonic()))), model):
                    return
            if time.monotonic() >= until:
                raise Unavailable(f"no worker was ready within {timeout_s:g} s")
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Give up what is in flight and close the socket. The client may be used again."""
        if self._socket is None or self._pid != os.getpid():
            return
        self._calls.fail_all(Cancelled("the client was closed"))
        wire.send_due(self._socket, self._calls)
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
        future: asyncio.Future[Completion | LoadOnceError] = self._open().create_future()
        self.submit(submit, request, Whole(functools.partial(_settle, future)), timeout_s)
        try:
            answer = await future
        except asyncio.CancelledError:
            self.cancel(submit.id)
            raise
        if isinstance(answer, LoadOnceError):
            raise answer
        return answer

    def _open(self) -> asyncio.AbstractEventLoop:
        """The running loop, with the socket open in it."""
        loop = asyncio.get_running_loop()
        if self._socket is not None and self._pid == os.getpid() and self._loop is loop:
            return loop
        if self._socket is not None and self._pid == os.getpid():
            self.close()  # of a loop that was before, as with several `asyncio.run`
        elif self._socket is not None:
            _of_the_parent.append((self._socket, self._context))
        address = self._address or default_address("clients")
        self._context, self._socket = wire.open_dealer(address, self._curve_keys)
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
        socket, until = self._socket, time.monotonic() + wire.RECEIVE_S
        # The descriptor tells of a change once, and sending may use that up: what counts is EVENTS, at the
        # very end. Asking is cheaper than finding nothing, which raises.
        while socket is not None:
            wire.send_due(socket, self._calls)
            if not readable(socket):
                return
            now = time.monotonic()
            if now >= until:
                self._pump_soon()
                return
            wire.deliver_one(socket, self._calls, now)
            socket = self._socket  # a listener may have closed the client


def _settle(future: asyncio.Future[T], value: T) -> None:
    """Hand on an answer, unless nobody waits for it any more."""
    if not future.done():
        future.set_result(value)
