"""A Flask app whose web workers share one model. No torch in here, and no model.

    gunicorn -w 4 --preload examples.flask_app:app

The client is made once, before the fork; each worker opens a socket of its own when it first asks. Needs a
pool (`make run`), found through LOADONCE_RUN_DIR or its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flask import Flask, Response, jsonify, request, stream_with_context
from flask.typing import ResponseReturnValue

from broker.client import Client
from broker.errors import InvalidRequest, LoadOnceError
from broker.requests import to_params

app = Flask(__name__)
client = Client(tenant="flask")


@app.post("/generation")
def generation() -> ResponseReturnValue:
    """The usual contract: prompt, max_new_tokens, gen_params → code, data."""
    asked = _json_object()
    prompt = asked.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest("prompt: expected some text", param="prompt")
    params = asked.get("gen_params") or {}
    if not isinstance(params, dict):
        raise InvalidRequest("gen_params: expected an object", param="gen_params")
    answer = client.generate(prompt, **{"max_tokens": asked.get("max_new_tokens", 100), **_known(params)})
    return jsonify(code=0, data=[{"generated_text": prompt + answer.text}])


@app.post("/chat")
def chat() -> ResponseReturnValue:
    """One turn, as plain text that arrives while it is made. A client that goes away cancels it."""
    asked = _json_object()
    stream = client.stream(
        messages=[{"role": "user", "content": str(asked.get("message", ""))}], max_tokens=200
    )

    def pieces() -> Iterator[str]:
        with stream:
            for chunk in stream:
                yield chunk.text

    return Response(stream_with_context(pieces()), mimetype="text/plain")


@app.errorhandler(LoadOnceError)
def refused(problem: LoadOnceError) -> ResponseReturnValue:
    """Every error of the pool's knows its HTTP status and whether a retry helps."""
    headers = {}
    if problem.retry_after_ms is not None:
        headers["Retry-After"] = str(-(-problem.retry_after_ms // 1000))
    return jsonify(code=problem.http_status, message=problem.message), problem.http_status, headers


def _json_object() -> dict[str, Any]:
    asked = request.get_json(silent=True)
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
