"""The broker's shell: three ROUTER sockets, one thread. Turns bytes into events and messages into bytes.

Decides nothing about requests; that is `scheduler`'s.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import zmq

from broker import curve
from broker import protocol as p
from broker.errors import LoadOnceError, ProtocolError
from broker.frames import NOBLOCK, NOBLOCK_MORE, readable, receive, send, send_frame
from broker.lifecycle import Side
from broker.logs import Log
from broker.scheduler import TICK_S, Scheduler

BATCH: Final = 256  # messages read from one socket before the others get their turn
HIGH_WATER: Final = 20_000  # messages buffered per peer, each way
HANDSHAKE_MS: Final = 5_000
HEARTBEAT_MS: Final = 2_000  # ZMTP's own, so that half-open TCP connections are found
HEARTBEAT_TIMEOUT_MS: Final = 10_000  # a peer that was paused for less keeps its connection
LINGER_MS: Final = 500
# Plain numbers: pyzmq's enums cost a microsecond each time that they are combined or looked up.
PEERS_LOGGED: Final = 20  # malformed peers that get a log line, each once, in a window of
LOG_WINDOW_S: Final = 60.0

Admin = Callable[[p.AdminMessage, float], list[bytes]]


class CannotListen(OSError):
    """An address can't be used; the sentence names it."""


class AddressTaken(CannotListen):
    """Another process listens there."""


class Sockets:
    """Owns the sockets; `run` reads, lets the scheduler decide, and sends, until `stop`.

    Args:
        addresses: by ``clients``, ``workers``, ``admin``.
        scheduler: the core.
        admin: answers a decoded admin message with the body frames of its reply, or raises a
            `LoadOnceError`.
        curve_keys: directory of CURVE keys; empty for local addresses.
    """

    def __init__(
        self, addresses: dict[str, str], scheduler: Scheduler, admin: Admin, curve_keys: str, log: Log
    ) -> None:
        self._addresses = addresses
        self._scheduler = scheduler
        self._admin_answer = admin
        self._curve_keys = curve_keys
        self._log = log
        self._locks: list[int] = []
        self._paths: list[Path] = []
        self._context = zmq.Context()
        self._clients = self._workers = self._admin = None  # type: zmq.Socket[bytes] | None
        self._authenticator: Any = None
        self._stopping = False
        self._malformed: set[bytes] = set()  # peers logged in this window
        self._window_ends = 0.0

    def bind(self) -> None:
        """Listen.

        Raises:
            AddressTaken: another process listens on one of the addresses.
            curve.KeysMissing: an address isn't local and there are no keys.
            CannotListen: an address is no address, or its directory isn't there.
        """
        if self._curve_keys:
            self._start_authenticator()
        self._clients = self._listen("clients")
        self._workers = self._listen("workers")
        self._admin = self._listen("admin")

    def run(self) -> None:
        """Receive, decide, send, tick; returns after `stop`."""
        clients, workers, admin = self._bound()
        poller = zmq.Poller()
        for socket in (clients, workers, admin):
            poller.register(socket, zmq.POLLIN)
        due = time.monotonic()
        while not self._stopping:
            wait_ms = max(0, int(1000 * (due - time.monotonic())) + 1)
            ready = dict(poller.poll(wait_ms))
            now = time.monotonic()
            if now >= due:
                # After a pause of our own, the tick must see the gap before it sees the peers' silence.
                self._scheduler.tick(now)
                due = now + TICK_S
            if workers in ready:
                self._drain(workers, self._from_worker, now)
            if clients in ready:
                self._drain(clients, self._from_client, now)
            if admin in ready:
                self._drain(admin, self._from_admin, now)
            self._send(now)

    def stop(self) -> None:
        """Make `run` return; safe in a signal handler."""
        self._stopping = True

    def close(self) -> None:
        """Close the sockets, remove their files and let the addresses go."""
        for socket in (self._clients, self._workers, self._admin):
            if socket is not None:
                socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        # Sockets of ours are closed, so this waits for their linger and no longer.
        self._context.term()
        for path in self._paths:
            path.unlink(missing_ok=True)
        for lock in self._locks:
            os.close(lock)

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def _drain(
        self, socket: zmq.Socket[bytes], handle: Callable[[bytes, list[bytes], float], None], now: float
    ) -> None:
        """Read what is there, up to `BATCH` messages; the caller knows that there is one."""
        handle(*_receive(socket), now)
        if not readable(socket):  # cheaper than an exception, dearer than a message
            return
        for _ in range(BATCH):
            try:
                identity, frames = _receive(socket)
            except zmq.Again:
                return
            handle(identity, frames, now)

    def _from_client(self, identity: bytes, frames: list[bytes], now: float) -> None:
        delimited = bool(frames) and not frames[0]
        try:
            if len(frames) > p.MAX_CLIENT_FRAMES:
                raise ProtocolError(f"{len(frames)} frames, at most {p.MAX_CLIENT_FRAMES} are allowed")
            delimited, header, body = p.split(frames)
            message = p.decode_header(p.from_client, header)
        except ProtocolError as problem:
            self._note_malformed("client", identity, problem, delimited, now)
            return
        self._scheduler.on_client(identity, message, body, delimited, now)

    def _from_worker(self, identity: bytes, frames: list[bytes], now: float) -> None:
        try:
            _, header, body = p.split(frames)
            message = p.decode_header(p.from_worker, header)
        except ProtocolError as problem:
            self._note_malformed("worker", identity, problem, False, now)
            return
        self._scheduler.on_worker(identity, message, body, now)

    def _from_admin(self, identity: bytes, frames: list[bytes], now: float) -> None:
        delimited = bool(frames) and not frames[0]
        try:
            delimited, header, _ = p.split(frames)
            message = p.decode_header(p.from_admin, header)
            answer = self._admin_answer(message, now)
        except LoadOnceError as problem:
            answer = [p.encode(p.Failed.of(problem))]
        envelope = [identity, b""] if delimited else [identity]
        _, _, admin = self._bound()
        try:
            admin.send_multipart([*envelope, *answer], NOBLOCK)
        except zmq.ZMQError as problem:
            self._log.warning("admin_unreachable", reason=str(problem))

    def _note_malformed(
        self, side: Side, identity: bytes, problem: ProtocolError, delimited: bool, now: float
    ) -> None:
        self._scheduler.on_malformed(side, identity, problem, delimited)
        if now >= self._window_ends:
            self._malformed.clear()
            self._window_ends = now + LOG_WINDOW_S
        if identity not in self._malformed and len(self._malformed) < PEERS_LOGGED:
            self._malformed.add(identity)
            self._log.warning("malformed", side=side, peer=identity.hex(), reason=problem.message)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def _send(self, now: float) -> None:
        """Send all that the scheduler says, and what it says about those that can't be reached."""
        clients, workers, _ = self._bound()
        while out := self._scheduler.take():
            unreachable: dict[tuple[Side, bytes], str] = {}
            unsent: dict[bytes, list[bytes]] = defaultdict(list)  # headers, by peer
            for side, identity, frames in out:
                if (side, identity) in unreachable:
                    unsent[identity].append(frames[0])
                    continue
                socket = clients if side == "client" else workers
                try:
                    _send(socket, identity, frames)
                except zmq.Again:
                    unreachable[side, identity] = "it doesn't read what it is sent"
                except zmq.ZMQError as problem:
                    unreachable[side, identity] = str(problem)
                if (side, identity) in unreachable:
                    unsent[identity].append(frames[0])
            for (side, identity), reason in unreachable.items():
                self._scheduler.metrics.unroutable += 1
                if side == "client":
                    self._scheduler.on_client_gone(identity, reason, now)
                else:
                    self._scheduler.on_worker_unroutable(identity, now, unsent[identity])

    # ── binding ──────────────────────────────────────────────────────────────────────────────────

    def _bound(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes], zmq.Socket[bytes]]:
        assert self._clients is not None and self._workers is not None and self._admin is not None
        return self._clients, self._workers, self._admin

    def _listen(self, which: str) -> zmq.Socket[bytes]:
        address = self._addresses[which]
        if not address.startswith(("ipc://", "tcp://")):
            raise CannotListen(f"{which}: {address} is no address; it begins with ipc:// or tcp://")
        socket = self._context.socket(zmq.ROUTER)
        # All before bind: afterwards they would hold for later connections only, or not at all.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, p.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.BACKLOG, 1024)
        try:
            curve.serve(socket, address, self._curve_keys)
            self._claim(address)
            socket.bind(address)
        except zmq.ZMQError as problem:
            socket.close(linger=0)
            if problem.errno == zmq.EADDRINUSE:
                raise AddressTaken(f"{which}: {address} is taken by another process") from None
            raise CannotListen(f"{which}: {address}: {problem.strerror}") from None
        except (OSError, ValueError):
            socket.close(linger=0)
            raise
        path = _ipc_path(address)
        if path is not None:
            self._paths.append(path)
            path.chmod(0o600)
        return socket

    def _claim(self, address: str) -> None:
        """Lock an ipc address: ZeroMQ itself would take it from a living process in silence."""
        path = _ipc_path(address)
        if path is None:
            return
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._locks.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AddressTaken(f"{address} is taken by another process") from None
        path.unlink(missing_ok=True)

    def _start_authenticator(self) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=str(Path(self._curve_keys) / "allowed"))


def _receive(socket: zmq.Socket[bytes]) -> tuple[bytes, list[bytes]]:
    """A peer's routing id and the frames of its message, or `zmq.Again` if there is none."""
    return socket.recv(NOBLOCK), receive(socket)


def _send(socket: zmq.Socket[bytes], identity: bytes, frames: list[bytes]) -> None:
    """Send a message to a peer, or raise `zmq.ZMQError`; then nothing of it was sent.

    ROUTER refuses a peer that is gone or full at the first frame; the others follow it unasked.
    """
    send_frame(socket, identity, NOBLOCK_MORE)
    send(socket, frames)


def _ipc_path(address: str) -> Path | None:
    """The file behind an ipc address; an abstract one (``ipc://@name``) has none."""
    path = address.removeprefix("ipc://")
    return Path(path) if address.startswith("ipc://") and not path.startswith("@") else None
