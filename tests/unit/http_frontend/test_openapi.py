"""The document says what the routes do."""

from __future__ import annotations

import json
import re
from typing import Any

from http_frontend.app import ROUTES
from http_frontend.openapi import OPERATIONS, document
from tests.unit.http_frontend.serving import serving


def test_every_route_is_in_the_document_with_its_method() -> None:
    described = {path: op.method.upper() for path, op in OPERATIONS.items()}
    assert described.pop("/v1/models/{model}") == "GET"
    assert described == {path: method for path, (method, _) in ROUTES.items()}


def test_all_references_lead_somewhere_and_patterns_are_javascripts() -> None:
    whole = document()
    text = json.dumps(whole)
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in whole["components"]["schemas"]
    assert r"\A" not in text
    assert r"\\Z" not in text


def test_bounds_of_the_structs_are_in_the_document() -> None:
    temperature = document()["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]
    number: dict[str, Any] = next(arm for arm in temperature["anyOf"] if arm["type"] == "number")
    assert (number["minimum"], number["maximum"]) == (0, 2)


async def test_the_pages_are_served_and_fetch_nothing_from_elsewhere() -> None:
    async with serving() as served:
        for path in ("/", "/docs"):
            status, text, headers = await served.get(path)
            assert status == 200
            assert headers["Content-Type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "http://" not in text
            assert "https://" not in text
        status, text, _ = await served.get("/openapi.json")
        assert json.loads(text) == document()
