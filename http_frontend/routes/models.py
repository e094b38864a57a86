"""`GET /v1/models` and `GET /v1/models/{name}`."""

from __future__ import annotations

from urllib.parse import unquote

import msgspec
from aiohttp import web

from broker.protocol import ModelInfo
from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming
from http_frontend.openai_types import ModelCard, ModelList
from http_frontend.replies import Reply

PREFIX = "/v1/models/"


async def list_models(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """Every model that a worker has registered since the broker started, its aliases too."""
    cards = [
        _card(model, name) for model in frontend.catalogue.models for name in (model.name, *model.aliases)
    ]
    return Reply(msgspec.json.encode(ModelList(cards)))


async def one_model(frontend: Frontend, request: Incoming) -> web.StreamResponse:
    """One of them; the name may hold slashes."""
    name = unquote(request.route.removeprefix(PREFIX))
    return Reply(msgspec.json.encode(_card(await frontend.catalogue.look_up(name), name)))


def _card(model: ModelInfo, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=model.created,
        context_length=model.context,
        workers=model.workers,
        root=model.name,
        quantization=model.quantization,
        dtype=model.dtype,
    )
