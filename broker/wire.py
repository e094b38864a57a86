"""The client's DEALER socket: options set before connect. Both clients open theirs here."""

from __future__ import annotations

import os
from typing import Final

import zmq

from broker import curve
from broker.protocol import MAX_FRAME_BYTES

HIGH_WATER: Final = 100_000
LINGER_MS: Final = 200
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
HEARTBEAT_MS: Final = 2_000


def open_dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, curve_keys: str) -> zmq.Socket[bytes]:
    """A DEALER with a routing id of its own, connected; it finds its broker again by itself.

    Raises:
        curve.KeysMissing: the address isn't local and there are no keys.
        zmq.ZMQError: the address is no address.
    """
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
    try:
        curve.connect(socket, address, curve_keys)
        socket.connect(address)
    except (ValueError, zmq.ZMQError):
        socket.close(linger=0)
        raise
    return socket
