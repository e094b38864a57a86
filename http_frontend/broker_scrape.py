"""The broker's own counters, asked for through its admin socket at each scrape."""

from __future__ import annotations

import asyncio
from typing import Final

import zmq
import zmq.asyncio

from broker import curve
from broker.errors import ProtocolError
from broker.protocol import AdminMetrics, AdminReply, decode_header, encode, split, to_admin
from http_frontend.metrics import SCRAPE_TIMEOUT_S

NO_ADMIN: Final = "off"  # in the place of an address: the broker isn't asked


async def broker_text(context: zmq.asyncio.Context, address: str, curve_keys: str) -> str:
    """Prometheus' text format, or nothing if the broker doesn't answer in time or won't say."""
    if address == NO_ADMIN:
        return ""
    socket = context.socket(zmq.DEALER)
    try:
        socket.linger = 0
        curve.connect(socket, address, curve_keys)
        socket.connect(address)
        await socket.send_multipart([encode(AdminMetrics())])
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            frames = await socket.recv_multipart()
        _, header, bodies = split(frames)
        if isinstance(decode_header(to_admin, header), AdminReply) and bodies:
            return bodies[0].decode()
        return ""
    except (TimeoutError, zmq.ZMQError, ProtocolError, UnicodeDecodeError):
        return ""
    finally:
        socket.close(linger=0)
