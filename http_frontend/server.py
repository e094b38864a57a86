"""Connections: listening, limits on them, what is not HTTP, and stopping without cutting anybody off."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from http_frontend import incoming
from http_frontend.app import make_handler
from http_frontend.errors import HttpError, answer_to
from http_frontend.frontend import Frontend
from http_frontend.replies import Reply, header_lines, status_line

BACKLOG: Final = 2048
LINGER_S: Final = 2.0  # an unread body is read and thrown away for so long, so that its answer arrives
SEND_BUFFER_BYTES: Final = 256 * 1024  # in the kernel, which would give a slow reader 4 MiB by itself
POLL_S: Final = 0.02


class Connection(RequestHandler):
    """aiohttp's connection; what it would answer as text or HTML is JSON here."""

    server: Server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or refuse it when there are too many."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if self.server.full:
            body = answer_to(HttpError(503, "too_many_connections", "Too many connections.")).body()
            head = b"Content-Type: application/json\r\nContent-Length: %d\r\nRetry-After: 1\r\n" % len(body)
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"%s%sConnection: close\r\n\r\n%s" % (status_line(503), head, body))
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what isn't HTTP, or a fault of ours outside all middlewares."""
        problem: Exception = InternalFault()
        if status == 500:
            self.server.frontend.log.error("a connection failed", exc=exc)
        elif isinstance(exc, LineTooLong) or "many headers" in str(exc).lower():
            problem = HttpError(431, "header_too_large", "The request's header is too large.")
        else:
            problem = HttpError(400, "bad_http", "This is not an HTTP request that can be understood.")
        said = answer_to(problem)
        self.server.frontend.metrics.errors[said.error.code or said.error.type] += 1
        return Reply(said.body(), status=said.status, extra=header_lines(said.headers), close=True)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """What aiohttp would log on a logger of its own."""
        exc = kw.get("exc_info")
        found = exc if isinstance(exc, BaseException) else None
        self.server.frontend.log.error("a connection failed", exc=found, what=str(args[0]))


class InternalFault(Exception):
    """Something that no middleware saw; already logged."""


class Server(web.Server):
    """All connections of this process. `start`, then `drain`."""

    def __init__(self, frontend: Frontend) -> None:
        settings = frontend.settings
        super().__init__(
            make_handler(frontend),
            request_factory=incoming.make,
            handler_cancellation=True,  # a client that goes away stops its work
            access_log=None,
            keepalive_timeout=settings.idle_timeout_s,
            max_line_size=settings.max_header_bytes,
            max_field_size=settings.max_header_bytes,
            max_headers=settings.max_headers,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        self.frontend = frontend
        self._listening: asyncio.Server | None = None
        frontend.metrics.connections = lambda: len(self._connections)

    def __call__(self) -> RequestHandler:
        """A new connection, for the event loop."""
        connection = Connection(self, loop=self._loop, **self._kwargs)
        connection.server = self
        return connection

    @property
    def full(self) -> bool:
        """Whether there are more connections than may be."""
        return len(self._connections) > self.frontend.settings.max_connections

    async def start(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections of a bound socket."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self, sock=sock, ssl=tls, backlog=BACKLOG)

    async def drain(self, grace_s: float) -> None:
        """Stop: finish what is in hand, at most `grace_s` seconds long.

        For the first half, new connections are still served, so that whoever balances the load has time
        to see `/ready` say no; after that they are refused, or go to the other frontends on the port.
        """
        self.frontend.draining = True
        await self._finish_in_hand(grace_s / 2)
        if self._listening is not None:
            self._listening.close()
        self.pre_shutdown()
        await self._finish_in_hand(grace_s / 2)
        await self.shutdown(timeout=POLL_S)

    async def _finish_in_hand(self, at_most_s: float) -> None:
        clock = self.frontend.clock
        until = clock() + at_most_s
        while self.frontend.metrics.in_hand and clock() < until:
            await asyncio.sleep(POLL_S)


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there already, which a port that may be shared doesn't tell by itself."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        "" if host in ("0.0.0.0", "::") else host,
        port,
        type=socket.SOCK_STREAM,  # noqa: S104
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0


def bind(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    """A bound TCP socket.

    Raises:
        OSError: the address is taken, or isn't ours.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
