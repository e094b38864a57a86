"""One round trip each, whole and streamed, of litellm and langchain-openai. Prints one JSON object.

Run by `test_http_more_clients.py` with the Python of a virtual environment that has them, because they
bring some forty packages along.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def litellm_says(url: str) -> dict[str, Any]:
    """litellm, told that this is some server of OpenAI's API."""
    litellm = import_module("litellm")

    common: dict[str, Any] = {
        "model": "openai/scripted", "api_base": url, "api_key": "none-needed", "max_tokens": 5, "seed": 3,
        "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    whole = litellm.completion(**common)
    chunks = list(litellm.completion(**common, stream=True))
    refused = ""
    try:
        litellm.completion(**{**common, "model": "openai/nope"})
    except litellm.NotFoundError as problem:
        refused = type(problem).__name__
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "refused": refused,
    }


def langchain_says(url: str) -> dict[str, Any]:
    """langchain-openai's chat model, with a tool bound in the last request."""
    model = import_module("langchain_openai").ChatOpenAI(
        model="scripted", base_url=url, api_key="none-needed", max_tokens=5, seed=3, max_retries=0
    )
    return {
        "whole": model.invoke("hi").content,
        "streamed": "".join(str(chunk.content) for chunk in model.stream("hi")),
        "usage": model.invoke("hi").usage_metadata["output_tokens"],
    }


if __name__ == "__main__":
    print(json.dumps({"litellm": litellm_says(sys.argv[1]), "langchain": langchain_says(sys.argv[1])}))
