"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Final

import msgspec
from aiohttp import web

from http_frontend import chat_answers, validate
from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming, decode
from http_frontend.openai_types import ChatRequest
from http_frontend.routes.answering import answer

_body: Final = msgspec.json.Decoder(ChatRequest)


async def chat_completions(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """One or more answers to a conversation."""
    body: ChatRequest = decode(_body, await frontend.body(request))
    model = await frontend.catalogue.look_up(body.model)
    ask = validate.chat(body, model, frontend.settings.max_n)
    id, created = f"chatcmpl-{request.request_id}", int(time.time())
    return await answer(
        frontend,
        request,
        body,
        model,
        ask,
        whole=lambda results: chat_answers.whole(body, results, id=id, created=created, model=model.name),
        streamed=lambda: chat_answers.ChatStream(body, id=id, created=created, model=model.name, n=ask.n),
    )
