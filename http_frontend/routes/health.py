"""`GET /health` (alive), `GET /ready` (a worker can serve), `GET /metrics`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming
from http_frontend.metrics import CONTENT_TYPE
from http_frontend.own_types import Health
from http_frontend.replies import Reply


async def health(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """This process is alive, whatever the rest does."""
    return Reply(msgspec.json.encode(Health("ok")))


async def ready(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """200 if a model can be served now; 503 if no worker can, the broker is silent, or we are stopping."""
    if frontend.draining:
        return Reply(msgspec.json.encode(Health("draining")), status=503, extra=b"Retry-After: 1\r\n")
    models = frontend.catalogue.ready
    if not models:
        return Reply(msgspec.json.encode(Health("no worker")), status=503, extra=b"Retry-After: 1\r\n")
    return Reply(msgspec.json.encode(Health("ready", models)))


async def metrics(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """Counters of all frontends, the broker and its workers, in Prometheus' text format."""
    return Reply(await frontend.scrape(), content_type=CONTENT_TYPE)
