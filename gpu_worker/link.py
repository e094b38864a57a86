"""The thread that owns the worker's socket. Carries bytes between the broker and the session."""

from __future__ import annotations

import contextlib
import os
import time
from queue import Empty, SimpleQueue
from typing import Any, Final

import zmq

from broker import curve
from broker import protocol as p
from broker.errors import ProtocolError
from broker.frames import receive, send
from broker.logs import Log, Seldom

from .exchange import Output, Quit
from .session import Session
from .watchdog import Watchdog

HIGH_WATER: Final = 100_000
LINGER_MS: Final = 1_000
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
HEARTBEAT_MS: Final = 2_000
HEARTBEAT_TIMEOUT_MS: Final = 10_000  # a peer that was paused for less keeps its connection
TICK_S: Final = 0.25


class Outbox:
    """What the engine's thread hands over: a queue, and a descriptor that wakes the link."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._queue: SimpleQueue[Output] = SimpleQueue()

    def put(self, output: Output) -> None:
        """Hand over an output; for the engine's thread."""
        self._queue.put(output)
        self.wake()

    def wake(self) -> None:
        """Make the link look; safe in a signal handler."""
        os.eventfd_write(self.descriptor, 1)

    def take(self) -> list[Output]:
        """All that was handed over; for the link's thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        outputs: list[Output] = []
        with contextlib.suppress(Empty):
            while True:
                outputs.append(self._queue.get_nowait())
        return outputs


class Link:
    """Owns the DEALER; `run` carries messages until the session has ended.

    Args:
        address: of the broker's worker socket.
        curve_keys: directory of CURVE keys; empty for local addresses.
        session: decides.
        inbox: the engine's.
        outbox: the engine's.
        watchdog: for a step that never returns.
        log: for what the broker says wrongly and what can't be sent, each at most once a second.
    """

    def __init__(
        self,
        address: str,
        curve_keys: str,
        session: Session,
        inbox: SimpleQueue[Any],
        outbox: Outbox,
        watchdog: Watchdog,
        log: Log,
    ) -> None:
        self._address = address
        self._curve_keys = curve_keys
        self._session = session
        self._inbox = inbox
        self._outbox = outbox
        self._watchdog = watchdog
        self._malformed = Seldom(lambda count, why: log.warning("malformed", messages=count, reason=why))
        self._unsent = Seldom(lambda count, why: log.warning("not sent", messages=count, reason=why))
        self._drain_grace_s: float | None = None

    def request_drain(self, grace_s: float) -> None:
        """Ask the session to drain; safe in a signal handler."""
        self._drain_grace_s = grace_s
        self._outbox.wake()

    def run(self) -> None:
        """Receive, decide, send, tick; returns when the session has ended and all was sent or lingered.

        Raises:
            curve.KeysMissing: the address isn't local and there are no keys.
            zmq.ZMQError: the address is no address.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        try:
            self._connect(socket)
            self._serve(socket)
        finally:
            self._inbox.put(Quit())
            socket.close(linger=LINGER_MS)
            context.term()

    def _connect(self, socket: zmq.Socket[bytes]) -> None:
        # A routing id for each process: a restarted worker is never taken for the one that died.
        socket.setsockopt(zmq.ROUTING_ID, b"w" + os.urandom(16))
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, p.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        curve.connect(socket, self._address, self._curve_keys)
        socket.connect(self._address)

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._outbox.descriptor, zmq.POLLIN)
        while True:
            now = time.monotonic()
            if self._drain_grace_s is not None:
                grace_s, self._drain_grace_s = self._drain_grace_s, None
                self._session.drain(grace_s, now)
            if self._watchdog.hung(now):
                self._session.stalled()
            self._session.tick(now)
            self._send(socket)
            if self._session.end is not None:
                return
            poller.poll(int(1000 * TICK_S))
            now = time.monotonic()
            for output in self._outbox.take():
                self._session.on_output(output, now)
            self._receive(socket, now)

    def _receive(self, socket: zmq.Socket[bytes], now: float) -> None:
        while True:
            try:
                frames = receive(socket)
            except zmq.Again:
                return
            try:
                _, header, body = p.split(frames)
                message = p.decode_header(p.to_worker, header)
            except ProtocolError as problem:
                self._malformed.note(problem.message)
                continue
            self._session.on_message(message, body, now)

    def _send(self, socket: zmq.Socket[bytes]) -> None:
        for command in self._session.commands():
            self._inbox.put(command)
        for frames in self._session.take():
            try:
                send(socket, frames)
            except zmq.Again:
                # At the high-water mark the broker has been away for long: what is lost here, the client
                # notices as a gap and has made anew.
                self._unsent.note(f"{HIGH_WATER} messages wait for the broker")
