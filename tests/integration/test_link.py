"""The link on a real socket: one thread owns it, everything arrives in order, the end is bounded."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from broker import frames
from broker import protocol as p
from broker.logs import SELDOM_S, Log
from gpu_worker import link
from gpu_worker.exchange import Counters, StepOutput
from gpu_worker.link import LINGER_MS, Link, Outbox
from gpu_worker.session import End, Session
from gpu_worker.watchdog import Watchdog
from tests.pool import wait_for

READY = p.Ready(
    name="gpu0", device="cpu", host="here", pid=1, slots=4,
    models=[p.ModelInfo(name="m", context=10, vocab=10)],
)  # fmt: skip


class Stand:
    """A link in a thread of its own, and its inbox and outbox."""

    def __init__(self, address: str) -> None:
        self.counters = Counters()
        self.log = io.StringIO()
        log = Log("test", stream=self.log)
        now = time.monotonic()
        self.session = Session(READY, self.counters, log, now)
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.outbox = Outbox()
        watchdog = Watchdog(self.counters, 60, now)
        self.link = Link(address, "", self.session, self.inbox, self.outbox, watchdog, log)
        self.thread = threading.Thread(target=self.link.run, name="link")
        self.thread.start()

    def lines(self, event: str) -> list[dict[str, Any]]:
        """What was logged of it."""
        found = map(json.loads, self.log.getvalue().splitlines())
        return [line for line in found if line["event"] == event]

    def leave(self) -> None:
        self.link.request_drain(0)
        self.thread.join(10)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w"


@pytest.fixture
def broker(address: str) -> Iterator[zmq.Socket[bytes]]:
    """The broker's side: a bare ROUTER."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, 5000)
    router.bind(address)
    yield router
    router.close(linger=0)
    context.term()


def heard(router: zmq.Socket[bytes]) -> tuple[bytes, p.WorkerMessage, list[bytes]]:
    identity, header, *body = router.recv_multipart()
    return identity, p.decode_header(p.from_worker, header), body


def test_c74_one_thread_owns_the_socket_while_another_streams(
    address: str, broker: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[int] = set()
    plain = frames.send

    def send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        used.add(threading.get_ident())
        plain(socket, frames)

    stand = Stand(address)
    identity, ready, _ = heard(broker)
    assert isinstance(ready, p.Ready)
    broker.send_multipart([identity, p.encode(p.BrokerBeat(session="s1"))])
    broker.send_multipart([identity, p.encode(p.Work(id="1.1", request_id="r")), b"request"])
    assert stand.inbox.get(timeout=5).id == "1.1"
    monkeypatch.setattr(link, "send", send)
    steps = 3000
    for step in range(steps):
        stand.outbox.put(StepOutput(chunks=[("1.1", b"%d" % step, 1)]))
        if step % 100 == 0:
            time.sleep(0.05)  # so that beats come in between
    got: list[bytes] = []
    beats = 0
    while len(got) < steps:
        _, message, body = heard(broker)
        beats += isinstance(message, p.WorkerBeat)
        got += body
    assert got == [b"%d" % step for step in range(steps)]
    assert beats >= 1
    assert used == {stand.thread.ident}
    stand.leave()
    assert stand.session.end is End.DRAINED


def test_what_the_broker_says_wrongly_is_logged_and_passed_over(
    address: str, broker: zmq.Socket[bytes]
) -> None:
    stand = Stand(address)
    identity, _, _ = heard(broker)
    kinds = [[b""], [b"\xdd\x7f\xff\xff\xff"], [b"\x80\x04pickle"], [p.encode({"type": "nonsense"})]]
    began, sent = time.monotonic(), 0
    for _ in range(100):
        for wrong in kinds:
            broker.send_multipart([identity, *wrong])
            sent += 1
    broker.send_multipart([identity, p.encode(p.BrokerBeat(session="s1"))])
    wait_for(lambda: "registered" in stand.log.getvalue(), "the worker to go on")
    lines = stand.lines("malformed")
    assert 1 <= len(lines) <= 1 + (time.monotonic() - began) / SELDOM_S < sent
    assert all(line["messages"] >= 1 and line["reason"] for line in lines)
    stand.leave()


@pytest.mark.parametrize("kind", [[b""], [b"\x80\x04pickle"], [p.encode({"type": "nonsense"})]])
def test_a_message_that_is_dropped_is_logged_with_its_reason(
    address: str, broker: zmq.Socket[bytes], kind: list[bytes]
) -> None:
    stand = Stand(address)
    identity, _, _ = heard(broker)
    broker.send_multipart([identity, *kind])
    wait_for(lambda: '"malformed"' in stand.log.getvalue(), "a line about it")
    (line,) = stand.lines("malformed")
    assert line["level"] == "warning" and line["reason"]
    stand.leave()


def test_what_can_not_be_sent_is_logged_once_a_second_at_the_most(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        raise zmq.Again

    monkeypatch.setattr(link, "send", full)
    began, stand = time.monotonic(), Stand(address)
    wait_for(lambda: '"not sent"' in stand.log.getvalue(), "a line about it")
    stand.leave()
    lines = stand.lines("not sent")
    assert 1 <= len(lines) <= 1 + (time.monotonic() - began) / SELDOM_S
    assert "wait for the broker" in lines[0]["reason"]


def test_c73_without_a_broker_it_still_leaves_within_its_linger(address: str) -> None:
    stand = Stand(address)
    began = time.monotonic()
    stand.leave()
    assert not stand.thread.is_alive()
    assert time.monotonic() - began < LINGER_MS / 1000 + 2


def test_a_broker_that_comes_later_is_found(address: str) -> None:
    stand = Stand(address)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, 5000)
    try:
        time.sleep(0.3)  # it has been refused for a while
        router.bind(address)
        assert isinstance(heard(router)[1], p.Ready)
    finally:
        stand.leave()
        router.close(linger=0)
        context.term()
