"""`POST /v1/completions`."""

from __future__ import annotations

import time
from typing import Final

import msgspec
from aiohttp import web

from http_frontend import completion_answers, validate
from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming, decode
from http_frontend.openai_types import CompletionRequest
from http_frontend.routes.answering import answer

_body: Final = msgspec.json.Decoder(CompletionRequest)


async def completions(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """One or more continuations of one or more prompts."""
    body: CompletionRequest = decode(_body, await frontend.body(request))
    model = await frontend.catalogue.look_up(body.model)
    ask = validate.completion(body, model, frontend.settings.max_n)
    id, created, count = f"cmpl-{request.request_id}", int(time.time()), len(ask.requests)
    return await answer(
        frontend,
        request,
        body,
        model,
        ask,
        whole=lambda results: completion_answers.whole(
            body, results, id=id, created=created, model=model.name
        ),
        streamed=lambda: completion_answers.CompletionStream(
            body, id=id, created=created, model=model.name, count=count
        ),
    )
