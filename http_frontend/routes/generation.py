"""`POST /generation`: the contract of the Flask apps that people come from."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from http_frontend import validate_generation
from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming, decode
from http_frontend.own_types import (
    GeneratedText,
    GenerationRequest,
    GenerationResponse,
    GenParams,
)
from http_frontend.replies import Reply

_body: Final = msgspec.json.Decoder(GenerationRequest)
encode: Final = msgspec.json.Encoder().encode


async def generation(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """Texts for one prompt or a list of them, prompts first, then `num_return_sequences`."""
    body: GenerationRequest = decode(_body, await frontend.body(request))
    model = await frontend.catalogue.look_up(body.model)
    ask = validate_generation.generation(body, model, frontend.settings.max_n)
    given = body.gen_params or GenParams()
    full = body.return_full_text is not False and given.return_full_text is not False
    job = frontend.start(request, model, ask, stream=False)
    try:
        results = await job.results()
    finally:
        frontend.close(request, job)
    texts = [
        GeneratedText(((asked.prompt or "") if full else "") + result.chunk.text)
        for asked, result in zip(ask.requests, results, strict=True)
    ]
    return Reply(encode(GenerationResponse(texts)))
