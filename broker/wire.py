"""Both clients' DEALER socket: options set before connect, whole messages between it and `Calls`."""

from __future__ import annotations

import logging
import os
import time
from typing import Final

import zmq

from broker import curve
from broker.calls import Calls
from broker.errors import ProtocolError
from broker.frames import readable, receive, send
from broker.logs import Seldom
from broker.protocol import MAX_FRAME_BYTES

RECEIVE_S: Final = 0.005  # of reading in a row
HIGH_WATER: Final = 100_000
LINGER_MS: Final = 200
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
HEARTBEAT_MS: Final = 2_000
HEARTBEAT_TIMEOUT_MS: Final = 10_000  # a peer that was paused for less keeps its connection
_log: Final = logging.getLogger("loadonce")  # of the program whose library we are
_unread: Final = Seldom(lambda count, why: _log.warning("%d messages of the broker dropped: %s", count, why))
_unsent: Final = Seldom(lambda count, why: _log.warning("%d messages not sent yet: %s", count, why))


def open_dealer(address: str, curve_keys: str) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """A context and in it a DEALER with a routing id of its own, connected; it reconnects by itself.

    Both are the caller's to close; if this raises, nothing is left open.

    Raises:
        curve.KeysMissing: the address isn't local and there are no keys.
        zmq.ZMQError: the address is no address.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    # A routing id of our own outlives a connection, so what the broker has for us still finds us.
    # Its first byte must not be zero: ZeroMQ keeps those for itself.
    socket.setsockopt(zmq.ROUTING_ID, b"c" + os.urandom(16))
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    try:
        curve.connect(socket, address, curve_keys)
        socket.connect(address)
    except (ValueError, zmq.ZMQError):
        socket.close(linger=0)
        context.term()
        raise
    return context, socket


def deliver(socket: zmq.Socket[bytes], calls: Calls, now: float) -> None:
    """Read what has come, for `RECEIVE_S` at the most: others wait for this thread too."""
    until = now + RECEIVE_S
    while time.monotonic() < until and readable(socket):
        deliver_one(socket, calls, now)


def deliver_one(socket: zmq.Socket[bytes], calls: Calls, now: float) -> None:
    """Read one message. What can't be decoded is dropped and logged: the call's own timeout covers it."""
    try:
        calls.on_message(receive(socket), now)
    except zmq.Again:
        return
    except ProtocolError as problem:
        _unread.note(problem.message)


def send_due(socket: zmq.Socket[bytes], calls: Calls) -> None:
    """Send all that is due. What finds no room is lost here and sent again after the next ping."""
    for frames in calls.take():
        try:
            send(socket, frames)
        except zmq.Again:
            _unsent.note(f"{HIGH_WATER} messages wait for the broker")
