"""What every request passes through, each a function of (request, handler); `app.py` puts them in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from aiohttp import web

from http_frontend.errors import HttpError, answer_to
from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming
from http_frontend.limits import PREFLIGHT
from http_frontend.replies import Reply, header_lines
from http_frontend.tracing import traceparent

Handler = Callable[[Incoming], Awaitable[web.StreamResponse]]


class Middleware(Protocol):
    """A function of (request, handler)."""

    async def __call__(self, request: Incoming, handler: Handler) -> web.StreamResponse:
        """Answer, most often by what the handler answers."""


OPEN_ROUTES: Final = frozenset({"/health"})  # served without a key
PAGES: Final = frozenset({"/", "/docs"})  # a browser asks for a key where these say that they need one
CLIENT_GONE: Final = 499


def observe(frontend: Frontend, routes: frozenset[str]) -> Middleware:
    """Request id, trace context, access log, counters. Outermost: it sees every answer.

    Args:
        frontend: whose log and counters.
        routes: known paths; others are counted together.
    """
    metrics, clock = frontend.metrics, frontend.clock

    async def observe(request: Incoming, handler: Handler) -> web.StreamResponse:
        started = clock()
        headers = request.headers
        request.request_id = frontend.ids.accept(headers.get("X-Request-Id"))
        request.extra = b"X-Request-Id: %s\r\n" % request.request_id.encode("ascii")
        route = request.route
        span, request.traceparent = frontend.spans.start(
            route, request.method, traceparent(headers.get("traceparent"))
        )
        metrics.in_hand += 1
        status = CLIENT_GONE
        try:
            response = await handler(request)
            status = response.status
            if frontend.draining:
                response.force_close()
            return response
        except asyncio.CancelledError:
            request.outcome = request.outcome or "client gone"
            metrics.disconnects += 1
            raise
        finally:
            metrics.in_hand -= 1
            name = route if route in routes else "other"
            metrics.requests[name, status] += 1
            frontend.spans.end(span, status, request.model)
            if frontend.settings.access_log:
                _log(frontend, request, status, clock() - started)

    return observe


def _log(frontend: Frontend, request: Incoming, status: int, seconds: float) -> None:
    line: dict[str, object] = {
        "request_id": request.request_id,
        "method": request.method,
        "path": request.route[:200],
        "status": status,
        "ms": round(seconds * 1000, 3),
        "client": request.remote,
    }
    for name, value in (
        ("model", request.model),
        ("key", request.caller.name),
        ("user", request.user),
        ("traceparent", request.traceparent),
        ("outcome", request.outcome),
    ):
        if value:
            line[name] = value
    frontend.access.write(line)


def answer(frontend: Frontend) -> Middleware:
    """Exceptions become answers, here and nowhere else; the header lines of `request.extra` are added."""

    async def answer(request: Incoming, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except Exception as problem:  # noqa: BLE001 - the boundary: whatever it is, the client gets an answer
            response = _answer_to(frontend, request, problem)
        if isinstance(response, Reply):
            response.extra += request.extra
        return response

    return answer


def _answer_to(frontend: Frontend, request: Incoming, problem: Exception) -> Reply:
    said = answer_to(problem)
    code = said.error.code or said.error.type
    frontend.metrics.errors[code] += 1
    request.outcome = code
    if said.status == 500:
        frontend.log.error("a request failed", exc=problem, request_id=request.request_id)
    body = said.generation_body() if request.route == "/generation" else said.body()
    return Reply(body, status=said.status, extra=header_lines(said.headers), close=said.close)


def guard_host(frontend: Frontend) -> Middleware:
    """Refuses hosts that aren't served; answers and marks cross-origin requests."""

    async def guard_host(request: Incoming, handler: Handler) -> web.StreamResponse:
        frontend.hosts.check(request.headers.get("Host", ""))
        origin = request.headers.get("Origin")
        if origin is not None:
            lines = frontend.origins.lines(origin)
            request.extra += lines
            if request.method == "OPTIONS" and lines:
                return Reply(status=204, extra=PREFLIGHT)
        return await handler(request)

    return guard_host


def authenticate(frontend: Frontend) -> Middleware:
    """Finds out who asks; without a key that is known, nothing but `OPEN_ROUTES` is served."""
    keys = frontend.keys

    async def authenticate(request: Incoming, handler: Handler) -> web.StreamResponse:
        if keys is not None and request.route not in OPEN_ROUTES:
            given = request.headers.get("Authorization")
            owner = None if given is None else keys.owner(given)
            if owner is None:
                raise _no_key(request, given)
            request.caller = owner
        return await handler(request)

    return authenticate


def _no_key(request: Incoming, given: str | None) -> HttpError:
    scheme = "Basic" if request.route in PAGES else "Bearer"
    message = "An API key is needed: Authorization: Bearer KEY." if given is None else "The API key is wrong."
    return HttpError(
        401, "invalid_api_key", message, headers=(("WWW-Authenticate", f'{scheme} realm="LoadOnce"'),)
    )
