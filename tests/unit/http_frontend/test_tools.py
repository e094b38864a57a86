"""Tool calls out of text, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import InvalidRequest
from http_frontend import tools
from http_frontend.openai_types import ChatRequest
from http_frontend.tools import CallArguments, CallStart, Content, Delta, ToolText

NAMES = frozenset({"weather", "add"})
ARGS = '{"city": "Pa{r}is \\"x\\"", "days": [1, {"a": 2}]}'

FAMILIES = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGS}}}\n</tool_call>',
    "hermes arguments first": f'<tool_call>{{"arguments": {ARGS}, "name": "weather"}}</tool_call>',
    "llama bare": f'{{"name": "weather", "parameters": {ARGS}}}',
    "llama typed": f'{{"type": "function", "name": "weather", "parameters": {ARGS}}}',
    "llama tag": f'<|python_tag|>{{"name": "weather", "parameters": {ARGS}}}',
    "llama function": f"<function=weather>{ARGS}</function>",
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGS}}}]',
    "mistral space": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGS}}}]',
    "mistral bare": f'[{{"name": "weather", "arguments": {ARGS}}}]',
    "mistral named": f"[TOOL_CALLS]weather{ARGS}",
    "mistral args": f"[TOOL_CALLS]weather[ARGS]{ARGS}",
    "quoted arguments": f'{{"name": "weather", "arguments": {json.dumps(ARGS)}}}',
}


def read(reader: ToolText, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls (name, arguments) of what the reader says, checking its order."""
    text, calls = "", list[tuple[str, str]]()
    deltas: list[Delta] = [d for piece in pieces for d in reader.push(piece)] + reader.finish()
    for delta in deltas:
        if isinstance(delta, Content):
            text += delta.text
        elif isinstance(delta, CallStart):
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        else:
            assert delta.index == len(calls) - 1
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.text)
    return text, calls


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize("family", FAMILIES)
@given(places=st.lists(st.integers(0, 400), max_size=8))
def test_a_call_of_each_family_is_read_however_it_is_cut(family: str, places: list[int]) -> None:
    text, calls = read(ToolText(NAMES), cut(FAMILIES[family], places))
    assert (text, calls) == ("", [("weather", ARGS)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read_character_by_character(family: str) -> None:
    assert read(ToolText(NAMES), list(FAMILIES[family])) == ("", [("weather", ARGS)])


@given(places=st.lists(st.integers(0, 400), max_size=8))
def test_text_before_two_hermes_calls(places: list[int]) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    text, calls = read(ToolText(NAMES), cut(f"Let me see.\n{call}\n{call}\n", places))
    assert text.strip() == "Let me see."
    assert calls == [("add", '{"a": 1}')] * 2


@pytest.mark.parametrize("between", ["; ", "\n", ""])
def test_several_llama_calls(between: str) -> None:
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert read(ToolText(NAMES), list(call + between + call)) == ("", [("add", '{"a": 1}')] * 2)


def test_several_mistral_calls() -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    assert read(ToolText(NAMES), list(f"[TOOL_CALLS] [{call}, {call}]")) == ("", [("add", '{"a": 1}')] * 2)


@pytest.mark.parametrize(
    "text",
    [
        "Plain text with {braces} and [lists].",
        '{"answer": 42}',
        "[1, 2, 3]",
        "{not json",
        '{"name": "unknown", "arguments": {}}',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "a < b and <tool",
        "<tool_call>nonsense</tool_call>",
        "[TOOL_CALLS]unknown{}",
        "<function=unknown>{}</function>",
        '{"name": 7}',
        '{"name": "add"',
        "  indented\n\n  text  ",
        "",
    ],
)
def test_what_only_looks_like_a_call_stays_text(text: str) -> None:
    got, calls = read(ToolText(NAMES), list(text))
    assert calls == []
    assert got.replace("</tool_call>", "") == text.replace("</tool_call>", "")


@given(
    text=st.text(alphabet='<{}[]",:\\ abtool_cl>TOLCAS/=fnpyhg|1', max_size=60),
    places=st.lists(st.integers(0, 60)),
)
def test_no_text_breaks_the_reader_and_cuts_dont_matter(text: str, places: list[int]) -> None:
    assert read(ToolText(NAMES), cut(text, places)) == read(ToolText(NAMES), [text])


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert read(ToolText(NAMES), ['{"name": "add"}']) == ("", [("add", "{}")])


def test_a_call_that_breaks_off_gives_what_came() -> None:
    whole = FAMILIES["hermes"]
    text, calls = read(ToolText(NAMES), [whole[:60]])
    assert text == ""
    assert calls[0][0] == "weather"
    assert ARGS.startswith(calls[0][1])


def test_arguments_leave_before_the_call_has_ended() -> None:
    reader = ToolText(NAMES)
    deltas = reader.push('<tool_call>{"name": "add", "arguments": {"a": 1')
    assert isinstance(deltas[0], CallStart)
    assert deltas[1:] == [CallArguments(0, '{"a": 1')]


def test_a_named_call_is_all_arguments() -> None:
    reader = ToolText(NAMES, mode="named", named="add")
    assert read(reader, ['{"a"', ": 1}"]) == ("", [("add", '{"a": 1}')])


def test_required_calls_are_a_list() -> None:
    reader = ToolText(NAMES, mode="list")
    text = '[ {"name": "add", "parameters": {"a": 1}} , {"name": "weather", "parameters": {}} ]'
    assert read(reader, list(text)) == ("", [("add", '{"a": 1}'), ("weather", "{}")])


def test_calls_past_the_first_are_dropped_when_only_one_is_wanted() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert read(ToolText(NAMES, most=1), [call * 2]) == ("", [("add", '{"a": 1}')])


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def request(**fields: Any) -> ChatRequest:
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/P"}},
        "$defs": {"P": {"type": "string"}},
    }
    listed = [
        {"type": "function", "function": {"name": "weather", "parameters": schema, "description": "d"}},
        {"type": "function", "function": {"name": "add"}},
    ]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": listed, **fields}
    return msgspec.convert(body, ChatRequest)


def test_the_template_sees_the_tools_as_they_came() -> None:
    seen = tools.for_template(request())
    assert seen is not None
    assert seen[1] == {"type": "function", "function": {"name": "add"}}
    assert tools.for_template(request(tool_choice="none")) is None


def test_a_required_call_is_a_grammar_with_definitions_moved_to_its_root() -> None:
    grammar = tools.forced_grammar(request(tool_choice="required", parallel_tool_calls=False))
    assert grammar is not None
    schema = json.loads(grammar.value)
    assert schema["maxItems"] == 1
    assert schema["$defs"] == {"weather.P": {"type": "string"}}
    first = schema["items"]["anyOf"][0]["properties"]
    assert first["name"] == {"const": "weather"}
    assert first["parameters"]["properties"]["p"] == {"$ref": "#/$defs/weather.P"}


def test_a_named_call_is_a_grammar_of_its_arguments() -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    grammar = tools.forced_grammar(request(tool_choice=choice))
    assert grammar is not None
    assert json.loads(grammar.value)["$defs"] == {"P": {"type": "string"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
        {"tool_choice": "required", "tools": []},
    ],
)
def test_a_choice_that_cant_be_made_names_tool_choice(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        tools.forced_grammar(request(**fields))
    assert refused.value.param == "tool_choice"
