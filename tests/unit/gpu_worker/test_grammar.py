"""An output under a grammar matches it, and a grammar that doesn't compile is the caller's error."""

from __future__ import annotations

import itertools
import json
import re
from itertools import pairwise
from typing import Literal

import pytest
import torch

from broker.errors import InternalError, InvalidRequest
from broker.protocol import Grammar
from gpu_worker.grammar import MAX_BYTES, MAX_RULES, Grammars, GrammarState
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
        ("json_schema", "[" * 60_000),
        ("json_schema", '{"allOf":[' * 3000 + "{}" + "]}" * 3000),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"$ref": "file:///etc/hostname"}'),
        ("regex", "(" * 5000 + "a" + ")" * 5000),
        ("regex", "a\ud800"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("lark", 'start: "a"\n' + "\n" * MAX_RULES),
        *((kind, "a" * (most + 1)) for kind, most in MAX_BYTES.items() if kind != "json_object"),
    ],
)
def test_a_grammar_that_does_not_compile_is_the_callers_error(
    grammars: Grammars, kind: Literal["json_schema", "regex", "lark"], value: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(Grammar(kind, value))
    assert caught.value.param == "grammar"


def chain(rule: str) -> str:
    """As many rules as a grammar may have, each of which leads to the next."""
    names = ["".join(letters) for letters in itertools.product("abcdefghijklm", repeat=3)]
    kept = [rule.format(one=one, next=next) for one, next in pairwise(names)][: MAX_RULES - 2]
    return "\n".join([f"start: {names[0]}", *kept, f'{names[len(kept)]}: "a"', ""])


@pytest.mark.parametrize(
    "rule", ["{one}:{next}", '{one}:"b" {next}', "{one}:({next} {next})*", "{one}:{next}+"]
)
@pytest.mark.parametrize("upper", [False, True])
def test_long_chains_of_rules_do_not_overrun_the_stack(grammars: Grammars, rule: str, upper: bool) -> None:
    lark = chain(rule)
    if upper:
        lark = lark.replace("start: ", "START: ").replace('"b"', '"1"').upper().replace("START:", "start:")
    try:
        grammars.compile(Grammar("lark", lark)).mask()
    except InvalidRequest as problem:
        assert "doesn't compile" in problem.message  # noqa: PT017 - either is fine, a crash isn't


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 10_000},
        {"type": "string", "format": "date-time"},
        {"type": "string", "pattern": r"^[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}$"},
        {"enum": [f"value-{number}" for number in range(3000)]},
        {"type": "object", "properties": {f"p{n}": {"type": "number"} for n in range(300)}},
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": ["null", "string"]}}},
        {"$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_schemas_as_people_write_them_are_within_the_limits(
    grammars: Grammars, schema: dict[str, object]
) -> None:
    state = grammars.compile(Grammar("json_schema", json.dumps(schema)))
    for _ in range(10):
        if state.finished:
            break
        state.accept(allowed(state)[0])


def test_a_thousand_choices_are_within_the_limits(grammars: Grammars) -> None:
    choices = " | ".join(json.dumps(f"class of things {number}") for number in range(1000))
    assert grammars.compile(Grammar("lark", f"start: {choices}")).mask() is not None


def test_a_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("regex", "once")
    grammars.compile(grammar)
    monkeypatch.setattr("gpu_worker.grammar.LLMatcher", None)
    assert grammars.compile(grammar).mask() is not None


def test_a_replayed_grammar_goes_on_where_it_was(grammars: Grammars) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    state = grammars.compile(grammar)
    ids: list[int] = []
    while not state.finished:
        again = grammars.compile(grammar)
        for token in ids:
            again.accept(token)
        assert allowed(again) == allowed(state)
        ids.append(allowed(state)[len(ids) % 3 if len(allowed(state)) > 3 else 0])
        if ids[-1] == byte_level().eos_token_id or len(ids) > 60:
            break
        state.accept(ids[-1])


def test_a_token_that_the_grammar_forbids_is_our_error(grammars: Grammars) -> None:
    state = grammars.compile(Grammar("regex", "a"))
    with pytest.raises(InternalError):
        state.accept(byte_level().convert_tokens_to_ids("b"))


def test_states_of_one_grammar_do_not_disturb_each_other(grammars: Grammars) -> None:
    grammar = Grammar("regex", "ab")
    first, second = grammars.compile(grammar), grammars.compile(grammar)
    first.accept(byte_level().convert_tokens_to_ids("a"))
    assert allowed(first) != allowed(second)
