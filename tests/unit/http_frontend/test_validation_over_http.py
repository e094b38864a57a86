"""What is refused at the edge, before anything is queued. Section A of the field cases, on a fake pool."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.unit.http_frontend.serving import CHAT, COMPLETIONS, Served, serving, user

HI = {"messages": [user("hi")]}
JSON = {"Content-Type": "application/json"}


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as one:
        yield one


async def refused(
    served: Served, path: str, body: Any, param: str | None, status: int = 400, **options: Any
) -> Any:
    """The error, after checking its shape, that it names the field, and that nothing was queued."""
    queued = len(served.pool.submitted)
    got, answer, _ = await served.post(path, body, **options)
    assert got == status, answer
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"] and error["type"]
    assert "Traceback" not in error["message"]
    assert len(served.pool.submitted) == queued
    status, _ = await served.chat()
    assert status == 200  # the next one works
    return error


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
async def test_c1_a_body_that_isnt_called_json_is_415(served: Served, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    await refused(served, CHAT, json.dumps(HI).encode(), None, 415, headers=headers)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b'{"model":', b"", b"[]", b"null", b"\xff\xfe", b"x", b"[" * 100_000])
async def test_c1_a_body_that_isnt_json_is_400(served: Served, path: str, body: bytes) -> None:
    await refused(served, path, body, None, headers=JSON)


async def test_c1_json_with_a_charset_is_fine(served: Served) -> None:
    status, _, _ = await served.post(
        CHAT, json.dumps(HI).encode(), headers={"Content-Type": "Application/JSON; charset=utf-8"}
    )
    assert status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_c2_no_messages_is_a_plain_400_even_for_a_stream(served: Served, stream: bool) -> None:
    await refused(served, CHAT, {"model": "m", "messages": [], "stream": stream}, "messages")


async def test_c4_text_parts_are_kept_in_order(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    status, answer, _ = await served.post(CHAT, {"messages": [user(parts)]})
    assert status == 200
    assert answer["choices"][0]["message"]["content"].strip() == "ab"
    sent = served.pool.submitted[-1].request.messages
    assert sent is not None
    assert sent[0].text == "ab"


async def test_c4_other_parts_are_refused_by_name(served: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    error = await refused(served, CHAT, {"messages": [user([part])]}, "messages[0].content[0].type")
    assert "image_url" in error["message"]


NULLABLE = [
    "max_tokens", "temperature", "top_p", "stop", "n", "seed", "stream", "stream_options", "user", "model",
    "logit_bias", "presence_penalty", "frequency_penalty", "logprobs", "top_k", "min_p", "response_format",
]  # fmt: skip


@pytest.mark.parametrize("name", NULLABLE)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_c5_null_is_the_same_as_absent(served: Served, path: str, name: str) -> None:
    body: dict[str, Any] = dict(HI) if path == CHAT else {"prompt": "hi"}
    plain = await served.post(path, body)
    nulled = await served.post(path, {**body, name: None})
    assert plain[0] == nulled[0] == 200
    first, second = served.pool.submitted[-2:]
    first.request.params.seed = second.request.params.seed = 0  # random where it isn't given
    assert first.request == second.request


async def test_c7_past_the_context_states_all_three_numbers(served: Served) -> None:
    ids = list(range(8))
    error = await refused(served, COMPLETIONS, {"prompt": ids, "max_tokens": 2045}, "prompt")
    assert error["code"] == "context_length_exceeded"
    for number in ("2048", "8", "2045"):
        assert number in error["message"]
    status, _, _ = await served.post(COMPLETIONS, {"prompt": ids, "max_tokens": 2040})
    assert status == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_c7_max_tokens_past_the_context_alone(served: Served, name: str) -> None:
    error = await refused(served, CHAT, {**HI, name: 2048}, name)
    assert error["code"] == "context_length_exceeded"


async def test_c9_echo_with_no_tokens_is_served_and_without_echo_refused(served: Served) -> None:
    status, _, _ = await served.post(COMPLETIONS, {"prompt": "hi", "echo": True, "max_tokens": 0})
    assert status == 200
    assert served.pool.submitted[-1].request.params.max_tokens == 0
    await refused(served, COMPLETIONS, {"prompt": "hi", "max_tokens": 0}, "max_tokens")


BAD_VALUES = [
    ("max_tokens", -223), ("max_tokens", 2**40), ("max_tokens", "5"), ("max_tokens", True),
    ("max_tokens", 1.5),
    ("n", 0), ("n", -1), ("n", 100_000), ("n", 65), ("n", "2"), ("n", False),
    ("temperature", -1), ("temperature", 3), ("temperature", "1"), ("temperature", True),
    ("top_p", 0), ("top_p", 1.5), ("top_p", "1"), ("top_k", -5), ("top_k", 1.5), ("min_p", 2),
    ("seed", 2**70), ("seed", "1"), ("seed", True), ("stream", 1), ("stream", "true"),
    ("stop", ""), ("stop", ["a"] * 17), ("stop", [1]), ("stop", 1), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("logit_bias", {"1": 101}),
    ("logit_bias", {"x": 1}), ("logit_bias", [1]), ("logit_bias", {"99999999": 5}),
    ("stop_token_ids", [999_999]), ("stop_token_ids", [-1]), ("min_tokens", -1), ("priority", 10),
    ("stream_options", {"include_usage": True}), ("user", 7), ("model", 7),
    ("guided_json", "{"), ("guided_json", 7), ("guided_choice", []), ("guided_regex", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_c10_a_bad_value_is_refused_by_the_fields_name(
    served: Served, path: str, name: str, value: Any
) -> None:
    body: dict[str, Any] = dict(HI) if path == CHAT else {"prompt": "hi"}
    queued = len(served.pool.submitted)
    status, answer, _ = await served.post(path, {**body, name: value})
    assert status == 400, answer
    assert answer["error"]["param"].split(".")[0].split("[")[0] == name, answer
    assert len(served.pool.submitted) == queued


@pytest.mark.parametrize("value", [0, 0.0, 1e-9])
@pytest.mark.parametrize("stream", [False, True])
async def test_c12_temperature_zero_is_accepted(served: Served, value: float, stream: bool) -> None:
    body = {**HI, "temperature": value, "stream": stream, "top_p": 0.5}
    async with served.http.post(CHAT, json=body) as answer:
        assert answer.status == 200
    assert served.pool.submitted[-1].request.params.temperature == value


async def test_c14_a_model_without_a_template_refuses_chat_and_serves_completions(served: Served) -> None:
    error = await refused(served, CHAT, {**HI, "model": "base"}, "messages")
    assert "/v1/completions" in error["message"]
    status, _, _ = await served.post(COMPLETIONS, {"model": "base", "prompt": "hi"})
    assert status == 200


SURROGATES = [
    rb'{"prompt":"hello \ud800 world"}',
    rb'{"prompt":"x","stop":"\udfff"}',
    rb'{"prompt":"x","model":"\ud800"}',
    rb'{"prompt":"x","user":"\ud800"}',
    rb'{"prompt":"x","\ud800":1}',
    b'{"prompt":"\xed\xa0\x80"}',
]


@pytest.mark.parametrize("body", SURROGATES)
async def test_c15_a_lone_surrogate_is_400(served: Served, body: bytes) -> None:
    await refused(served, COMPLETIONS, body, None, headers=JSON)


async def test_c15_a_lone_surrogate_in_a_role_is_400(served: Served) -> None:
    await refused(served, CHAT, rb'{"messages":[{"role":"\ud800","content":"x"}]}', None, headers=JSON)


BAD_PROMPTS: list[Any] = [
    [0, 5, 10_000_000], [-1], [], [1.5], "", [""], [[]], [[1], []], [1, [2]], ["a", 1], [[["a"]]], {}, 7,
    None, [[1, 2], [1000]], [2**80],
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=str)
async def test_c46_a_prompt_that_is_none_is_refused(served: Served, prompt: Any) -> None:
    status, answer, _ = await served.post(COMPLETIONS, {"prompt": prompt})
    assert status == 400
    assert answer["error"]["param"].startswith("prompt"), answer
    assert not served.pool.submitted


async def test_an_unknown_model_is_404_and_names_model(served: Served) -> None:
    error = await refused(served, CHAT, {**HI, "model": "nope"}, "model", 404)
    assert error["code"] == "model_not_found"


async def test_an_alias_is_as_good_as_the_name(served: Served) -> None:
    status, answer = await served.chat(model="alias")
    assert (status, answer["model"]) == (200, "m")


async def test_an_unknown_field_is_refused_by_name(served: Served) -> None:
    await refused(served, CHAT, {**HI, "temprature": 1}, "temprature")


NOT_SERVED = [
    ("audio", {"voice": "x"}), ("functions", []), ("function_call", "auto"), ("prediction", {}),
    ("reasoning_effort", "low"), ("verbosity", "low"), ("web_search_options", {}), ("store", True),
    ("modalities", ["text", "audio"]), ("service_tier", "flex"), ("prompt_cache_key", "x"),
    ("moderation", {}), ("tool_choice", {"type": "custom", "custom": {"name": "f"}}),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NOT_SERVED)
async def test_a_documented_field_that_isnt_served_is_refused_by_name(
    served: Served, name: str, value: Any
) -> None:
    error = await refused(served, CHAT, {**HI, name: value}, name)
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(("name", "value"), [("best_of", 2), ("suffix", "x")])
async def test_completions_refuse_by_name_what_isnt_served(served: Served, name: str, value: Any) -> None:
    error = await refused(served, COMPLETIONS, {"prompt": "x", name: value}, name)
    assert error["code"] == "unsupported_parameter"


ACCEPTED: list[dict[str, Any]] = [
    {"store": False}, {"modalities": ["text"]}, {"service_tier": "auto"}, {"metadata": {"a": "b"}},
    {"user": "u", "safety_identifier": "s"}, {"max_tokens": 5, "max_completion_tokens": 5},
    {"logit_bias": {"5": -100, "7": 1.5}}, {"stop": []}, {"stop": "x"}, {"stop": ["x"] * 16},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}},
    {"logprobs": True, "top_logprobs": 20}, {"logprobs": False}, {"parallel_tool_calls": True}, {"tools": []},
]  # fmt: skip


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
async def test_a_served_field_is_accepted(served: Served, fields: dict[str, Any]) -> None:
    status, answer = await served.chat(**fields)
    assert status == 200, answer


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [user("x"), {"role": "user", "content": 7}]}, "messages[1].content"),
    ],
)
async def test_fields_that_depend_on_each_other(served: Served, fields: dict[str, Any], param: str) -> None:
    await refused(served, CHAT, {**HI, **fields}, param)


async def test_arguments_of_an_earlier_call_must_be_an_object(served: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
    body = {"messages": [user("x"), {"role": "assistant", "tool_calls": [call]}]}
    await refused(served, CHAT, body, "messages[1].tool_calls[0].function.arguments")


async def test_an_answer_may_be_sent_back_as_it_came(served: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assistant = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [call],
        "annotations": [],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "2"}
    status, _, _ = await served.post(CHAT, {"messages": [user("x"), assistant, result]})
    assert status == 200
    messages = served.pool.submitted[-1].request.messages
    assert messages is not None
    assert messages[1].tool_calls == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]


async def test_formats_become_grammars(served: Served) -> None:
    schema = {"type": "object"}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "json_schema",
            '{"type":"object"}',
        ),
        ({"guided_json": schema}, "json_schema", '{"type":"object"}'),
        ({"guided_json": json.dumps(schema)}, "json_schema", '{"type":"object"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes", 'n"o']}, "lark", 'start: "yes" | "n\\"o"'),
        ({"guided_grammar": 'start: "x"'}, "lark", 'start: "x"'),
    ]
    for fields, kind, value in cases:
        status, answer = await served.chat(**fields)
        assert status == 200, answer
        grammar = served.pool.submitted[-1].request.params.grammar
        assert grammar is not None
        assert (grammar.kind, grammar.value) == (kind, value)


async def test_choices_have_seeds_of_their_own_made_from_the_first(served: Served) -> None:
    await served.chat(n=3, seed=7)
    await served.chat(n=3, seed=7)
    seeds = [got.request.params.seed for got in served.pool.submitted]
    assert seeds[0] == 7
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]


GENERATION_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [1]}, "prompt[0]"), ({}, "prompt"),
    ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens"),
    ({"prompt": "x", "max_new_tokens": 5000}, "max_new_tokens"),
    ({"prompt": "x", "gen_params": {"num_beams": 2}}, "gen_params.num_beams"),
    ({"prompt": "x", "gen_params": {"foo": 2}}, "gen_params.foo"),
    ({"prompt": "x", "gen_params": {"max_length": 2}}, "gen_params.max_length"),
    ({"prompt": "x", "gen_params": {"temperature": "hot"}}, "gen_params.temperature"),
    ({"prompt": "x", "gen_params": []}, "gen_params"), ({"prompt": "x", "foo": 1}, "foo"),
    ({"prompt": "x", "max_new_tokens": 2, "gen_params": {"max_new_tokens": 2}}, "max_new_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), GENERATION_REFUSED, ids=str)
async def test_generation_refuses_in_its_own_shape(served: Served, body: dict[str, Any], param: str) -> None:
    status, answer, _ = await served.post("/generation", body)
    assert (status, answer["code"]) == (400, 400)
    assert answer["message"]
    assert answer["param"] == param
    assert not served.pool.submitted


async def test_generation_includes_the_prompt_unless_told_otherwise(served: Served) -> None:
    _, whole, _ = await served.post("/generation", {"prompt": "a b"})
    assert whole == {"code": 0, "data": [{"generated_text": "a ba b "}]}
    for body in ({"return_full_text": False}, {"gen_params": {"return_full_text": False}}):
        _, rest, _ = await served.post("/generation", {"prompt": "a b", **body})
        assert rest["data"] == [{"generated_text": "a b "}]


async def test_generation_maps_the_names_of_transformers(served: Served) -> None:
    given = {
        "do_sample": False, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2, "min_new_tokens": 2,
        "num_return_sequences": 2, "stop_strings": ["x"], "eos_token_id": 7, "seed": 3, "num_beams": 1,
    }  # fmt: skip
    body = {"prompt": ["a", "b"], "max_new_tokens": 9, "gen_params": given}
    status, answer, _ = await served.post("/generation", body)
    assert status == 200
    assert len(answer["data"]) == 4
    params = served.pool.submitted[0].request.params
    assert (params.max_tokens, params.temperature, params.top_k) == (9, 0.0, 5)
    assert (params.stop, params.include_stop, params.stop_token_ids, params.min_tokens) == (
        ["x"],
        True,
        [7],
        2,
    )
    assert [got.request.prompt for got in served.pool.submitted] == ["a", "a", "b", "b"]


def nested(depth: int) -> Any:
    """An object so many levels deep."""
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, nested(100), [nested(70)]])
async def test_json_that_cant_go_on_the_wire_is_refused_by_name(served: Served, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": value}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": value})}}
    for body, param in [
        ({**HI, "tools": [tool]}, "tools[0].function.parameters"),
        ({**HI, "tools": [tool], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({**HI, "guided_json": {"x": value}}, "guided_json"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ]:
        await refused(served, CHAT, body, param)
    await refused(served, "/tokenize", {**HI, "tools": [tool]}, "tools[0].function.parameters")


async def test_json_within_the_bounds_is_served(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": [2**64 - 1, nested(40)]}}}
    status, answer = await served.chat(tools=[tool])
    assert status == 200, answer
