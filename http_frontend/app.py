"""The map of this folder: which route is where, and what every request passes through, in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from aiohttp import web

from http_frontend.errors import HttpError
from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming
from http_frontend.middlewares import Handler, Middleware, answer, authenticate, guard_host, observe
from http_frontend.routes import health, models, pages, tokens
from http_frontend.routes.chat import chat_completions
from http_frontend.routes.completions import completions
from http_frontend.routes.generation import generation

Route = Callable[[Frontend, Incoming], Awaitable[web.StreamResponse]]

ROUTES: Final[dict[str, tuple[str, Route]]] = {
    "/v1/chat/completions": ("POST", chat_completions),
    "/v1/completions": ("POST", completions),
    "/generation": ("POST", generation),
    "/tokenize": ("POST", tokens.tokenize),
    "/detokenize": ("POST", tokens.detokenize),
    "/v1/models": ("GET", models.list_models),
    "/health": ("GET", health.health),
    "/ready": ("GET", health.ready),
    "/metrics": ("GET", health.metrics),
    "/openapi.json": ("GET", pages.openapi_json),
    "/docs": ("GET", pages.docs),
    "/": ("GET", pages.console),
}


def middlewares(frontend: Frontend) -> list[Middleware]:
    """Outermost first."""
    return [
        observe(frontend, frozenset(ROUTES)),  # sees every answer, whatever refuses
        answer(frontend),  # turns what all below raise into answers
        guard_host(frontend),  # before keys: a foreign page learns nothing
        authenticate(frontend),  # before any route, unknown ones too
    ]


def make_handler(frontend: Frontend) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """All of it as the one function that aiohttp's server calls."""
    handler: Handler = partial(_dispatch, frontend)
    for middleware in reversed(middlewares(frontend)):
        handler = partial(middleware, handler=handler)
    return handler  # type: ignore[return-value]  # our request factory makes Incoming


async def _dispatch(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    path = request.route
    found = ROUTES.get(path)
    if found is None and path.startswith(models.PREFIX) and len(path) > len(models.PREFIX):
        found = ("GET", models.one_model)
    if found is None:
        raise HttpError(404, "not_found", f"There is nothing at {path[:200]}.")
    method, route = found
    if request.method != method and not (method == "GET" and request.method == "HEAD"):
        raise HttpError(
            405, "method_not_allowed", f"{path[:200]} takes {method}.", headers=(("Allow", method),)
        )
    return await route(frontend, request)
