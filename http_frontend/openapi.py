"""`/openapi.json`, made of the structs that the routes decode and encode. Knows no route's code."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec

from http_frontend import openai_types as t
from http_frontend import own_types as own

JSON: Final = "application/json"


class Operation(msgspec.Struct, frozen=True):
    """One route as the document describes it."""

    method: str
    summary: str
    answer: Any  # a struct, or the media type of what isn't JSON
    body: Any = None
    errors: Any = t.ErrorResponse
    more: dict[int, Any] = {}  # other statuses with a body of their own
    streams: bool = False
    parameters: tuple[str, ...] = ()


STREAM: Final = "with stream: true; each data line is one JSON object, the last is [DONE]"
_TEXT: Final = "text/plain"
_HTML: Final = "text/html"

OPERATIONS: Final[dict[str, Operation]] = {
    "/v1/chat/completions": Operation(
        "post", "Answer a conversation", t.ChatResponse, t.ChatRequest, streams=True
    ),
    "/v1/completions": Operation(
        "post", "Continue a text", t.CompletionResponse, t.CompletionRequest, streams=True
    ),
    "/generation": Operation(
        "post",
        "Continue a text, as before",
        own.GenerationResponse,
        own.GenerationRequest,
        own.GenerationError,
    ),
    "/tokenize": Operation("post", "Text to token ids", own.TokenizeResponse, own.TokenizeRequest),
    "/detokenize": Operation("post", "Token ids to text", own.DetokenizeResponse, own.DetokenizeRequest),
    "/v1/models": Operation("get", "The models that are served", t.ModelList),
    "/v1/models/{model}": Operation("get", "One of them", t.ModelCard, parameters=("model",)),
    "/health": Operation("get", "Is this process alive?", own.Health),
    "/ready": Operation("get", "Can a worker serve?", own.Health, more={503: own.Health}),
    "/metrics": Operation("get", "Counters, in Prometheus' text format", _TEXT),
    "/openapi.json": Operation("get", "This document", dict[str, Any]),
    "/docs": Operation("get", "This document, to look at", _HTML),
    "/": Operation("get", "A console to try the models", _HTML),
}

# Every operation may meet these; the middlewares and the pool answer them.
ERRORS: Final = {
    400: "The request is wrong; param names the field",
    401: "No API key, or a wrong one",
    404: "No such model or path",
    405: "Another method",
    408: "The body took too long",
    413: "The body is too large",
    415: "The body isn't JSON",
    421: "The host isn't served here",
    429: "A limit was reached; Retry-After says when to come again",
    499: "Cancelled by an operator",
    500: "A fault of ours",
    503: "No worker can serve now; Retry-After says when to come again",
    504: "The deadline has passed",
}


def document() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    types = {kind for op in OPERATIONS.values() for kind in _structs(op)}
    listed = sorted(types, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(listed, ref_template="#/components/schemas/{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "LoadOnce", "version": _version(), "description": "One model, every request."},
        "paths": {path: {op.method: _operation(path, op)} for path, op in OPERATIONS.items()},
        "components": {
            "schemas": _for_javascript(components),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _structs(op: Operation) -> list[Any]:
    kinds = [op.answer, op.body, op.errors, *op.more.values()]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


def _operation(path: str, op: Operation) -> dict[str, Any]:
    content = _content(op.answer)
    if op.streams:
        content["text/event-stream"] = {"schema": {"description": STREAM}}
    responses = {"200": {"description": "The answer", "content": content}}
    for status, why in ERRORS.items():
        kind = op.more.get(status, op.errors)
        responses[str(status)] = {"description": why, "content": _content(kind)}
    made: dict[str, Any] = {
        "summary": op.summary,
        "operationId": f"{op.method}_{path.strip('/').replace('/', '_').replace('.', '_') or 'console'}",
        "responses": responses,
    }
    if op.body is not None:
        made["requestBody"] = {"required": True, "content": _content(op.body)}
    if op.parameters:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in op.parameters
        ]
    return made


def _content(kind: Any) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {"schema": {"type": "string"}}}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {JSON: {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    return {JSON: {"schema": {"type": "object"}}}


def _for_javascript(schema: Any) -> Any:
    """Patterns as JSON Schema wants them, with ``^`` and ``$``, where Python's have A and Z."""
    if isinstance(schema, list):
        return [_for_javascript(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value.replace(r"\A", "^").replace(r"\Z", "$")
        if key == "pattern" and isinstance(value, str)
        else _for_javascript(value)
        for key, value in schema.items()
    }


def _version() -> str:
    try:
        return version("loadonce")
    except PackageNotFoundError:
        return "0"
