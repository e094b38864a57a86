"""The client library: `Client` (blocking), and `AsyncClient` with the same method names.

    with Client() as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        with client.stream(messages=[{"role": "user", "content": "Hi"}]) as answer:
            for chunk in answer:
                print(chunk.text, end="")

Both may be made before a fork: the socket is opened in the process that first uses the client.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import zmq

from broker import protocol as p
from broker import wire
from broker.addresses import address as default_address
from broker.async_client import TICK_S, TIMEOUT_S, AsyncClient, AsyncStream
from broker.calls import Calls, Listener, make_submit
from broker.errors import Cancelled, InternalError, LoadOnceError, Unavailable
from broker.listeners import BUFFERED_CHUNKS, Event, Reader, Whole, served
from broker.requests import Completion, Turn, conversation, detokenization, generation, tokenization

__all__ = ["AsyncClient", "AsyncStream", "Client", "Completion", "Stream"]

# Loops of the parent process, kept in a child so that nothing of theirs is closed there.
_of_the_parent: list[object] = []


class _Loop:
    """The thread that owns one process's socket. Others hand it functions to run on its `Calls`.

    Whatever ends it, all who wait hear of it.
    """

    def __init__(self, address: str, curve_keys: str) -> None:
        self.pid = os.getpid()
        self.calls = Calls(time.monotonic())
        self.closing = False
        self._context, self._socket = wire.open_dealer(address, curve_keys)
        self._todo: deque[tuple[Callable[[], None], Callable[[LoadOnceError], None]]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Guards `closing`, and `_wake` while it is open. A finalizer may run wherever memory is asked for.
        self._lock = threading.RLock()
        # A daemon, so that a program that forgets `close` still ends.
        self._thread = threading.Thread(target=self._run, name="loadonce-client", daemon=True)
        self._thread.start()

    def do(self, act: Callable[[], None], failed: Callable[[LoadOnceError], None]) -> None:
        """Run a function in the loop's thread, soon; `failed` hears there why it could not be done.

        Raises:
            Cancelled: the client was closed in the meantime.
        """
        with self._lock:
            if self.closing:
                raise Cancelled("the client was closed")
            self._todo.append((act, failed))
            os.eventfd_write(self._wake, 1)

    def do_if_open(self, act: Callable[[], None]) -> None:
        """Run a function in the loop's thread, if there still is one and it is this process's."""
        if self.pid == os.getpid():
            with contextlib.suppress(Cancelled):
                self.do(act, lambda _: None)

    def stop(self) -> None:
        """Have the thread end all calls and close the socket, soon. Does nothing in a forked child."""
        if self.pid != os.getpid():
            return
        with self._lock:
            if not self.closing:
                self.closing = True
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End all calls and close the socket; what is unsent has a fraction of a second."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        problem: LoadOnceError = Cancelled("the client was closed")
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            while not self.closing:
                self._turn(poller)
        except Exception as fault:  # noqa: BLE001 - the thread's boundary: who waits must not wait for ever
            problem = InternalError(f"The client's thread has failed: {fault!r}.")
            problem.__cause__ = fault
        with self._lock:
            self.closing = True
            os.close(self._wake)
        while self._todo:
            self._todo.popleft()[1](problem)
        self.calls.fail_all(problem)
        wire.send_due(self._socket, self.calls)
        self._socket.close()
        self._context.term()

    def _turn(self, poller: zmq.Poller) -> None:
        """Wait, do what is asked, receive, let time pass, send."""
        poller.poll(int(1000 * TICK_S) if self.calls.busy else None)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._todo:
            act, failed = self._todo[0]  # stays until it is done: an unforeseen error is told to all in here
            try:
                act()
            except LoadOnceError as problem:
                failed(problem)
            self._todo.popleft()
        now = time.monotonic()
        wire.deliver(self._socket, self.calls, now)
        self.calls.tick(now)
        wire.send_due(self._socket, self.calls)


class Stream:
    """One streaming answer: iterate over its chunks; afterwards `outcome` says how it ended.

    Leaving its ``with`` block early cancels the request. Where several threads read, each chunk goes to one
    of them, and all hear the end. A process that was forked in the meantime can't read it.
    """

    def __init__(self, events: queue.SimpleQueue[Event], cancel: Callable[[], None], id: str) -> None:
        self.id = id
        self.outcome: p.Outcome | None = None
        self.done: p.Done | None = None
        self._problem: LoadOnceError | None = None
        self._events = events
        self._cancel = cancel
        self._pid = os.getpid()

    def waiting(self) -> int:
        """Events that its reader hasn't taken yet."""
        return self._events.qsize()

    def cancel(self) -> None:
        """Give it up, if it hasn't ended; who still reads gets what has come and then `Cancelled`."""
        if self.outcome is None and self._problem is None:
            self._cancel()
            self._events.put(Cancelled("the stream was left"))

    def __iter__(self) -> Iterator[p.Chunk]:
        while self.outcome is None:
            if self._pid != os.getpid():
                raise RuntimeError("this stream was begun before the fork: only the parent hears its answer")
            if self._problem is not None:
                raise self._problem
            event = self._events.get()
            if isinstance(event, p.Chunk):
                yield event
                continue
            self._events.put(event)  # the end is for every reader
            if isinstance(event, LoadOnceError):
                self._problem = event
            else:
                self.done, self.outcome = event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """Blocking client; safe to share between threads, and to make before a fork.

    Args:
        address: the broker's address for clients; empty for the one in the run directory.
        tenant: requests are fair between tenants.
        timeout_s: for calls that name none.
        curve_keys: directory of CURVE keys, for addresses on other hosts.
        buffered_chunks: of one stream, not yet read; a reader further behind gets `Overloaded`.
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
        self._lock = threading.Lock()
        self._loop: _Loop | None = None
        self._dropped = weakref.finalize(self, int)  # of the loop that is open, if one is
        self._dropped.atexit = False
        _clients.add(self)

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
        cancel = lambda: self._cancel(submit.id)
        reader = Reader(events.put, events.qsize, cancel, self._buffered_chunks)
        self._begin(submit, request, reader, timeout_s)
        return Stream(events, cancel, submit.id)

    def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = None) -> list[int]:
        """The tokens of a text."""
        return self._whole(tokenization(text), model, 5, timeout_s).token_ids

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None) -> str:
        """The text of tokens."""
        return self._whole(detokenization(token_ids), model, 5, timeout_s).text

    def models(self, timeout_s: float = 5.0) -> list[p.ModelInfo]:
        """Every model that was served since the broker started.

        Raises:
            Unavailable: no broker answers.
        """
        heard: queue.SimpleQueue[p.Models | LoadOnceError] = queue.SimpleQueue()
        hear = heard.put
        loop = self._running()
        loop.do(lambda: loop.calls.list_models(hear), hear)
        try:
            answer = heard.get(timeout=timeout_s)
        except queue.Empty:
            loop.do_if_open(lambda: loop.calls.forget_models(hear))
            raise Unavailable("no broker answers") from None
        if isinstance(answer, LoadOnceError):
            raise answer
        return answer.models

    def wait_ready(self, timeout_s: float = 60.0, model: str = "") -> None:
        """Wait until a worker can serve.

        Raises:
            Unavailable: none could within the time.
        """
        until = time.monotonic() + timeout_s
        while not served(self._models_or_none(max(0.05, min(1.0, until - time.monotonic()))), model):
            if time.monotonic() >= until:
                raise Unavailable(f"no worker was ready within {timeout_s:g} s")
            time.sleep(0.05)

    def close(self) -> None:
        """Give up what is in flight and close the socket. The client may be used again."""
        with self._lock:
            loop, self._loop = self._loop, None
            self._dropped.detach()
        if loop is not None:
            loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── within ───────────────────────────────────────────────────────────────────────────────────

    def _whole(self, request: p.Request, model: str, priority: int, timeout_s: float | None) -> Completion:
        submit = make_submit(request, model=model, tenant=self._tenant, priority=priority)
        answers: queue.SimpleQueue[Completion | LoadOnceError] = queue.SimpleQueue()
        self._begin(submit, request, Whole(answers.put), timeout_s)
        try:
            answer = answers.get()
        except BaseException:
            # Ctrl-C, or a web server's signal handler that ends the worker: nobody waits any more.
            self._cancel(submit.id)
            raise
        if isinstance(answer, LoadOnceError):
            raise answer
        return answer

    def _begin(
        self, submit: p.Submit, request: p.Request, listener: Listener, timeout_s: float | None
    ) -> None:
        loop = self._running()
        seconds = self._timeout_s if timeout_s is None else timeout_s
        loop.do(
            lambda: loop.calls.submit(submit, request, listener, time.monotonic(), seconds),
            listener.on_failed,
        )

    def _cancel(self, id: str) -> None:
        loop = self._loop
        if loop is not None:
            loop.do_if_open(lambda: loop.calls.cancel(id))

    def _models_or_none(self, timeout_s: float) -> list[p.ModelInfo]:
        with contextlib.suppress(Unavailable):
            return self.models(timeout_s)
        return []

    def _running(self) -> _Loop:
        with self._lock:
            if self._loop is None or self._loop.closing:
                loop = _Loop(self._address or default_address("clients"), self._curve_keys)
                # A client that is dropped without `close` must not leave a thread behind for ever.
                self._dropped.detach()
                self._dropped = weakref.finalize(self, loop.stop)
                self._dropped.atexit = False
                self._loop = loop
            return self._loop

    def _forget(self) -> None:
        """In a forked child: the parent's socket and thread aren't ours; a lock held there isn't either."""
        self._lock = threading.Lock()
        if self._loop is not None:
            _of_the_parent.append(self._loop)
            self._loop = None


def _forget_in_child() -> None:
    for client in list(_clients):
        client._forget()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)
