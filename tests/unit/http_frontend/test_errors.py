"""Every error as HTTP says it."""

from __future__ import annotations

import json

import pytest

from broker.errors import BY_CODE, InvalidRequest, LoadOnceError, Overloaded
from http_frontend.errors import HttpError, answer_to


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_each_error_of_the_pool_has_its_status_and_openais_shape(code: str) -> None:
    kind = BY_CODE[code]
    answer = answer_to(kind("what happened", param="x", retry_after_ms=1500))
    assert answer.status == kind.http_status
    error = json.loads(answer.body())["error"]
    assert error["message"] == "what happened"
    assert error["code"] == kind.code
    assert error["param"] == "x"
    assert (answer.headers != ()) == kind.retryable or answer.status == 504
    if answer.headers:
        assert dict(answer.headers) == {"Retry-After": "2"}


def test_what_isnt_ours_is_told_neutrally() -> None:
    answer = answer_to(ZeroDivisionError("secret"))
    assert answer.status == 500
    assert b"secret" not in answer.body()


def test_generations_shape_has_a_code_that_is_never_zero() -> None:
    body = json.loads(answer_to(InvalidRequest("no", param="prompt")).generation_body())
    assert body == {"code": 400, "message": "no", "param": "prompt", "error": "invalid_request"}


def test_a_refusal_of_http_keeps_its_headers() -> None:
    answer = answer_to(HttpError(405, "method_not_allowed", "no", headers=(("Allow", "POST"),), close=True))
    assert (answer.status, answer.headers, answer.close) == (405, (("Allow", "POST"),), True)


def test_a_hint_is_whole_seconds_and_at_least_the_time_asked_for() -> None:
    assert dict(answer_to(Overloaded("x", retry_after_ms=1)).headers)["Retry-After"] == "1"
    assert dict(answer_to(Overloaded("x", retry_after_ms=2001)).headers)["Retry-After"] == "3"
    assert issubclass(Overloaded, LoadOnceError)
