"""`GET /openapi.json`, `GET /docs`, and the console at `/`. The pages fetch nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming
from http_frontend.openapi import document
from http_frontend.replies import Reply

STATIC: Final = Path(__file__).resolve().parent.parent / "static"
HTML: Final = "text/html; charset=utf-8"
# Scripts and styles stand in the page itself; it may talk to where it came from and nowhere else.
POLICY: Final = (
    b"Content-Security-Policy: default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    b"style-src 'unsafe-inline'; frame-ancestors 'none'\r\n"
)


async def openapi_json(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """The document made of the routes' structs."""
    return Reply(_document())


async def docs(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """The document, to look at."""
    return Reply(_page("docs.html"), content_type=HTML, extra=POLICY)


async def console(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """A page to try the models."""
    return Reply(_page("console.html"), content_type=HTML, extra=POLICY)


@cache
def _document() -> bytes:
    return msgspec.json.encode(document())


@cache
def _page(name: str) -> bytes:
    return (STATIC / name).read_bytes()
