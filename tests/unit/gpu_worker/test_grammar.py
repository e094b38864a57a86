"""An output under a grammar matches it, and a grammar that doesn't compile is the caller's error."""

from __future__ import annotations

import json
import re
from typing import Literal

import pytest
import torch

from broker.errors import InternalError, InvalidRequest
from broker.protocol import Grammar
from gpu_worker.grammar import MAX_GRAMMAR_BYTES, Grammars, GrammarState
from tests.unit.gpu_worker.tokenizers import byte_level

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = byte_level()
    return Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))


def allowed(state: GrammarState) -> list[int]:
    bits = (state.mask()[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return [i for i in bits.view(-1).nonzero()[:, 0].tolist() if i < len(byte_level())]


def write(state: GrammarState, seed: int) -> str:
    """A random output that the masks allow."""
    choose = torch.Generator().manual_seed(seed)
    tokenizer = byte_level()
    ids: list[int] = []
    while not state.finished and len(ids) < 400:
        tokens = allowed(state)
        token = tokens[int(torch.randint(len(tokens), (1,), generator=choose))]
        if token == tokenizer.eos_token_id:
            break
        state.accept(token)
        ids.append(token)
    text: str = tokenizer.decode(ids)
    return text


@pytest.mark.parametrize("seed", range(5))
def test_an_output_under_a_schema_is_json_of_that_schema(grammars: Grammars, seed: int) -> None:
    state = grammars.compile(Grammar("json_schema", json.dumps(SCHEMA)))
    value = json.loads(write(state, seed))
    assert set(value) == {"name", "age"} and isinstance(value["age"], int) and len(value["name"]) <= 5


def test_an_output_under_an_expression_matches_it(grammars: Grammars) -> None:
    pattern = "(yes|no), [a-c]{3}"
    for seed in range(5):
        assert re.fullmatch(pattern, write(grammars.compile(Grammar("regex", pattern)), seed))


def test_an_output_under_a_lark_grammar_matches_it(grammars: Grammars) -> None:
    lark = 'start: "a" ("b" | "c") "d"\n'
    for seed in range(5):
        assert write(grammars.compile(Grammar("lark", lark)), seed) in ("abd", "acd")


def test_any_object_begins_with_a_brace(grammars: Grammars) -> None:
    state = grammars.compile(Grammar("json_object"))
    tokenizer = byte_level()
    assert all(tokenizer.decode([token]).lstrip()[:1] in ("{", "") for token in allowed(state))


def test_the_end_is_allowed_only_when_the_output_is_complete(grammars: Grammars) -> None:
    eos = byte_level().eos_token_id
    state = grammars.compile(Grammar("regex", "a+"))
    assert eos not in allowed(state)
    state.accept(byte_level().convert_tokens_to_ids("a"))
    assert eos in allowed(state)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", "{not json"),
        ("json_schema", '{"type": "martian"}'),
        ("regex", "(unclosed"),
        ("regex", "[z-a]"),
        ("lark", "start: missing_rule"),
        ("lark", "nonsense ((("),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1)),
    ],
)
def test_a_grammar_that_does_not_compile_is_the_callers_error(
    grammars: Grammars, kind: Literal["json_schema", "regex", "lark"], value: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(Grammar(kind, value))
    assert caught.value.param == "grammar"


def test_a_token_that_the_grammar_forbids_is_our_error(grammars: Grammars) -> None:
    state = grammars.compile(Grammar("regex", "a"))
    with pytest.raises(InternalError):
        state.accept(byte_level().convert_tokens_to_ids("b"))


def test_states_of_one_grammar_do_not_disturb_each_other(grammars: Grammars) -> None:
    grammar = Grammar("regex", "ab")
    first, second = grammars.compile(grammar), grammars.compile(grammar)
    first.accept(byte_level().convert_tokens_to_ids("a"))
    assert allowed(first) != allowed(second)
