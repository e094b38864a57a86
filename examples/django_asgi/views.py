"""Async views: while a request waits for the model, its web worker serves others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.views.decorators.http import require_POST

from broker.client import AsyncClient, AsyncStream
from broker.errors import InvalidRequest, LoadOnceError
from broker.requests import to_params

client = AsyncClient(tenant="django")  # opens its socket in the event loop that first uses it
View = Callable[[HttpRequest], Awaitable[HttpResponseBase]]


def answers(view: View) -> View:
    """Turn the pool's errors into JSON: each knows its HTTP status and whether a retry helps."""

    @wraps(view)
    async def answered(request: HttpRequest) -> HttpResponseBase:
        try:
            return await view(request)
        except LoadOnceError as problem:
            said = {"code": problem.http_status, "message": problem.message}
            response = JsonResponse(said, status=problem.http_status)
            if problem.retry_after_ms is not None:
                response["Retry-After"] = str(-(-problem.retry_after_ms // 1000))
            return response

    return answered


@require_POST
@answers
async def generation(request: HttpRequest) -> HttpResponse:
    """The usual contract: prompt, max_new_tokens, gen_params → code, data."""
    asked = _json_object(request)
    prompt = asked.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest("prompt: expected some text", param="prompt")
    params = asked.get("gen_params") or {}
    if not isinstance(params, dict):
        raise InvalidRequest("gen_params: expected an object", param="gen_params")
    answer = await client.generate(
        prompt, **{"max_tokens": asked.get("max_new_tokens", 100), **_known(params)}
    )
    return JsonResponse({"code": 0, "data": [{"generated_text": prompt + answer.text}]})


@require_POST
@answers
async def chat(request: HttpRequest) -> StreamingHttpResponse:
    """One turn, as plain text that arrives while it is made. A client that goes away cancels it."""
    message = str(_json_object(request).get("message", ""))
    stream = client.stream(messages=[{"role": "user", "content": message}], max_tokens=200)
    return StreamingHttpResponse(_pieces(stream), content_type="text/plain; charset=utf-8")


async def _pieces(stream: AsyncStream) -> AsyncIterator[str]:
    async with stream:
        async for chunk in stream:
            yield chunk.text


def _json_object(request: HttpRequest) -> dict[str, Any]:
    try:
        asked = json.loads(request.body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise InvalidRequest("the body must be a JSON object")
    return asked


def _known(params: dict[str, Any]) -> dict[str, Any]:
    """gen_params in our terms; a field that isn't a sampling parameter is named in the error."""
    params = dict(params)
    if params.pop("do_sample", True) is False:
        params["temperature"] = 0
    to_params(params)
    return params
