"""Errors keep their code over the wire; their table is complete."""

from __future__ import annotations

import pytest

from broker import errors


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_every_code_comes_back_as_its_own_class(code: str) -> None:
    back = errors.from_wire(code, "why", param="p", retry_after_ms=7)
    assert (type(back).code, back.message, back.param, back.retry_after_ms) == (code, "why", "p", 7)


def test_an_unknown_code_is_an_internal_error() -> None:
    assert type(errors.from_wire("martian", "why")) is errors.InternalError


def test_the_drawn_tree_names_every_class_with_its_code_and_status() -> None:
    drawing = errors.__doc__ or ""
    for code, cls in errors.BY_CODE.items():
        lines = [line for line in drawing.splitlines() if f" {cls.__name__} " in line]
        assert len(lines) == 1, cls
        assert code in lines[0] and str(cls.http_status) in lines[0]


def test_only_errors_that_may_pass_are_retryable() -> None:
    retryable = {cls.__name__ for cls in errors.BY_CODE.values() if cls.retryable}
    assert retryable == {"Overloaded", "Unavailable", "OutOfMemory", "DeadlineExceeded"}


def test_too_deep_a_nesting_is_the_callers_fault() -> None:
    assert "deep" in errors.from_validation(RecursionError()).message
