"""Raw peers on real sockets: what they send is up to the test, right or wrong."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import pytest
import zmq

from broker import protocol as p

PATIENCE_MS = 10_000


class Peer:
    """A DEALER that says what it is told to say."""

    def __init__(self, address: str, identity: bytes = b"") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if identity:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Go without a word."""
        self.socket.close(linger=0)
        self._context.term()

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def say(self, message: p.Message, *body: bytes) -> None:
        self.send(p.encode(message), *body)

    def heard(self, timeout_ms: int = PATIENCE_MS) -> list[bytes] | None:
        """The next message, or None after a while."""
        return self.socket.recv_multipart() if self.socket.poll(timeout_ms) else None

    def hear(self) -> Sequence[bytes]:
        """The next message; the test fails if none comes."""
        frames = self.heard()
        if frames is None:
            pytest.fail(f"nothing came within {PATIENCE_MS} ms")
        return frames


class RawClient(Peer):
    """Speaks the client's side, one message at a time."""

    def submit(self, id: str, prompt: str = "hi", **header: object) -> None:
        params = p.Params(max_tokens=4, seed=1)
        submit = p.Submit(id=id, **header)  # type: ignore[arg-type]
        self.say(submit, p.encode(p.Request(prompt=prompt, params=params)))

    def answer(self) -> p.BrokerToClient:
        """The header of the next message."""
        return p.decode_header(p.to_client, p.split(self.hear())[1])


class RawWorker(Peer):
    """Speaks the worker's side, one message at a time."""

    def register(self, name: str = "gpu0", slots: int = 1, pid: int = 0) -> p.BrokerToWorker:
        """Say ready; returns what the broker says to it."""
        infos = [p.ModelInfo("scripted", 4096, 1000)]
        self.say(p.Ready(name, "none", "here", pid or os.getpid(), slots, infos))
        return self.told()

    def told(self) -> p.BrokerToWorker:
        """The header of the next message."""
        return p.decode_header(p.to_worker, self.hear()[0])

    def work(self) -> tuple[p.Work, Sequence[bytes]]:
        """The next work; beats before it are skipped."""
        while True:
            header, *body = self.hear()
            message = p.decode_header(p.to_worker, header)
            if isinstance(message, p.Work):
                return message, body

    def finish(self, id: str) -> None:
        """End a request well."""
        outcome = p.Outcome(finish_reason="stop", usage=p.Usage(1, 0))
        self.say(p.Done(id), p.encode(outcome))


@contextlib.contextmanager
def raw(directory: object) -> Iterator[tuple[RawClient, RawWorker]]:
    """A client and a worker of a pool's directory; the worker isn't registered yet."""
    client = RawClient(f"ipc://{directory}/clients")
    worker = RawWorker(f"ipc://{directory}/workers")
    try:
        yield client, worker
    finally:
        client.close()
        worker.close()
