"""Schemathesis over `/openapi.json`: no 5xx, no error that isn't JSON, answers as the document says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.core.transport import Response

from http_frontend.openapi import document
from tests.integration.http_serving import HttpPool, http_pool

# `make fuzz-http` asks for 10,000.
CASES = int(os.environ.get("LOADONCE_HTTP_CASES", "300"))
schema = schemathesis.openapi.from_dict(document())
OPERATIONS = 13


@pytest.fixture(scope="module")
def served() -> Iterator[HttpPool]:
    with http_pool("--deadline-s", "20", worker=("--steps-per-s", "2000", "--slots", "64")) as one:
        yield one


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as one:
        yield one


def check(response: Response) -> None:
    """What holds for every answer, whatever was sent."""
    assert response.status_code < 500, response.text
    kind = response.headers.get("content-type", [""])[0]
    if response.status_code >= 400:
        assert kind == "application/json", (response.status_code, kind)


@schema.parametrize()
@settings(
    max_examples=max(1, CASES // OPERATIONS), deadline=None, suppress_health_check=list(HealthCheck),
    derandomize="LOADONCE_HTTP_CASES" not in os.environ,
)  # fmt: skip
@pytest.mark.timeout(3600)
def test_no_case_breaks_the_frontend(
    served: HttpPool, session: requests.Session, case: schemathesis.Case[Any]
) -> None:
    response = case.call(base_url=served.url, session=session, timeout=60)
    check(response)
    # Ours are stricter than the document can say: context, vocabulary, fields that exclude each other.
    stricter: Any = schemathesis.checks.CHECKS.get_one("positive_data_acceptance")
    case.validate_response(response, excluded_checks=[stricter])


def test_the_pool_is_as_it_was(served: HttpPool) -> None:
    assert served.post("/generation", {"prompt": "x"})[0] == 200
    assert '"level": "error"' not in served.pool.log("http"), served.pool.log("http")
