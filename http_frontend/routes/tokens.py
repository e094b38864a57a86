"""`POST /tokenize` and `/detokenize`: the worker has the tokenizer, so these are requests of the pool."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from broker.errors import InvalidRequest
from broker.protocol import Chunk, ModelInfo, Request
from http_frontend import tools, validate
from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming, decode
from http_frontend.own_types import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from http_frontend.replies import Reply

_tokenize: Final = msgspec.json.Decoder(TokenizeRequest)
_detokenize: Final = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """The token ids of a text, or of a conversation through the model's template."""
    body: TokenizeRequest = decode(_tokenize, await frontend.body(request))
    model = await frontend.catalogue.look_up(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Either prompt or messages is needed.", param="prompt")
    if body.messages is not None and not model.chat:
        raise InvalidRequest(f"The model {model.name} has no chat template.", param="messages")
    wanted = Request(
        prompt=body.prompt,
        messages=None if body.messages is None else validate.conversation(body.messages),
        tools=tools.shown(body.tools),
        add_generation_prompt=body.add_generation_prompt is not False,
        task="tokenize",
    )
    tokens = (await _ask(frontend, request, model, wanted)).token_ids
    return Reply(msgspec.json.encode(TokenizeResponse(len(tokens), model.context, tokens)))


async def detokenize(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """The text of token ids."""
    body: DetokenizeRequest = decode(_detokenize, await frontend.body(request))
    model = await frontend.catalogue.look_up(body.model)
    validate.tokens_in_vocabulary(body.tokens, model, "tokens")
    if not body.tokens:
        return Reply(msgspec.json.encode(DetokenizeResponse("")))
    wanted = Request(token_ids=body.tokens, task="detokenize")
    text = (await _ask(frontend, request, model, wanted)).text
    return Reply(msgspec.json.encode(DetokenizeResponse(text)))


async def _ask(frontend: Frontend, request: Incoming, model: ModelInfo, wanted: Request) -> Chunk:
    job = frontend.start(request, model, validate.Ask([wanted], 1), stream=False)
    try:
        return (await job.results())[0].chunk
    finally:
        frontend.close(request, job)
