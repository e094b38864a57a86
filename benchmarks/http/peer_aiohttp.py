"""Bare aiohttp on uvloop: what a hello world costs."""

from __future__ import annotations

import sys

import uvloop
from aiohttp import web


async def answer(request: web.Request) -> web.Response:
    """Decode the body and answer 300 bytes."""
    await request.json()
    return web.json_response({"text": "y" * 300})


app = web.Application()
app.router.add_post("/v1/chat/completions", answer)
web.run_app(
    app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None, loop=uvloop.new_event_loop()
)
