"""From arguments to a request: what is wrong is named before anything is sent."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import pytest

from broker import protocol as p
from broker.errors import InvalidRequest
from broker.requests import conversation, detokenization, generation, to_params, tokenization

TURN = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: generation(None, None, {}), "prompt"),
        (lambda: generation("a", [1], {}), "prompt"),
        (lambda: generation(5, None, {}), "prompt"),  # type: ignore[arg-type]
        (lambda: generation(None, [1.5], {}), "token_ids"),  # type: ignore[list-item]
        (lambda: generation(None, 7, {}), "token_ids"),  # type: ignore[arg-type]
        (lambda: generation("a", None, {"logit_bias": {"x": 1}}), "logit_bias"),
        (lambda: generation("a", None, {"seed": "x"}), "seed"),
        (lambda: conversation([], None, {}), "messages"),
        (lambda: conversation([5], None, {}), "messages[0]"),  # type: ignore[list-item]
        (lambda: conversation([TURN, {"role": 1}], None, {}), "messages[1].role"),
        (lambda: conversation([TURN, {**TURN, "contents": "x"}], None, {}), "messages[1].contents"),
        (lambda: conversation([{"role": "user"}], None, {}), "messages[0].content"),
        (lambda: conversation([p.ChatMessage("user")], None, {}), "messages[0].content"),
        (lambda: conversation([TURN], ["f"], {}), "tools[0]"),  # type: ignore[list-item]
        (lambda: tokenization(None), "text"),  # type: ignore[arg-type]
        (lambda: detokenization(["a"]), "token_ids"),  # type: ignore[list-item]
    ],
)
def test_the_field_at_fault_is_named(make: Callable[[], p.Request], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        make()
    assert raised.value.param == field
    assert raised.value.message.startswith(field.split("[")[0])


def test_a_turn_that_only_calls_tools_needs_no_content() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "tool", "content": "5", "tool_call_id": "c", "name": "f"}
    request = conversation([TURN, {"role": "assistant", "tool_calls": [call]}, answer], None, {})
    assert request.messages is not None and request.messages[1].tool_calls == [call]


def test_any_sequence_of_integers_is_token_ids() -> None:
    assert generation(None, array.array("q", [1, 2, 3]), {}).token_ids == [1, 2, 3]
    assert detokenization((4, 5)).token_ids == [4, 5]


def test_a_stop_may_be_one_string_and_a_bias_a_map() -> None:
    given: dict[str, Any] = {"stop": "END", "logit_bias": {"7": -1.5}, "top_k": None}
    assert to_params(given) == p.Params(stop=["END"], logit_bias=[(7, -1.5)])
