"""OpenAI's own Python client and its async twin against a real pool, every feature in one list."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import NOT_GIVEN

from examples.scripted_worker import scripted
from tests.integration.http_serving import KEY, HttpPool, http_pool
from tests.pool import wait_for

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[HttpPool]:
    with http_pool(worker=("--steps-per-s", "500", "--slots", "64")) as one:
        yield one


@pytest.fixture
def client(served: HttpPool) -> Iterator[openai.OpenAI]:
    with served.openai(max_retries=0) as one:
        yield one


def words(prompt: str, seed: int, count: int) -> str:
    """What the scripted worker answers."""
    return "".join(scripted(prompt, seed, count))


def test_a_chat_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=HI, max_tokens=5, seed=3)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == words("hi", 3, 5)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 6)
    assert answer.object == "chat.completion"
    assert answer.model == "scripted"


def test_a_chat_stream_says_the_same(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="scripted",
        messages=HI,
        max_tokens=5,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == words("hi", 3, 5)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": "@say=Paris"}]
    with client.chat.completions.stream(model="scripted", messages=said, max_tokens=9) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Paris"


def test_choices_differ_and_come_back_by_their_seed(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(model="scripted", messages=HI, max_tokens=5, seed=3, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert first[0] == words("hi", 3, 5)
    assert len(set(first)) == 3
    assert texts() == first


def test_choices_in_a_stream_are_told_apart(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="scripted", messages=HI, max_tokens=5, seed=3, n=3, stream=True
    )
    texts = ["", "", ""]
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    whole = client.chat.completions.create(model="scripted", messages=HI, max_tokens=5, seed=3, n=3)
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_completion_of_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="once", max_tokens=4, seed=9)
    assert answer.choices[0].text == words("once", 9, 4)
    assert answer.object == "text_completion"


def test_completions_default_to_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="once")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_list_of_prompts_has_an_answer_for_each(client: openai.OpenAI) -> None:
    prompts = ["a", "b", "c"]
    answer = client.completions.create(model="scripted", prompt=prompts, max_tokens=4, seed=9, n=2)
    assert len(answer.choices) == 6
    for index, prompt in enumerate(prompts):
        assert answer.choices[2 * index].text == words(prompt, 9, 4)


def test_token_ids_are_a_prompt(client: openai.OpenAI) -> None:
    one = client.completions.create(model="scripted", prompt=[1, 2, 3], max_tokens=2, seed=1)
    assert one.usage is not None
    assert one.usage.prompt_tokens == 3
    two = client.completions.create(model="scripted", prompt=[[1, 2], [3]], max_tokens=2)
    assert len(two.choices) == 2


def test_a_completion_stream_says_the_same(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="scripted", prompt=["x", "y"], max_tokens=6, seed=2, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [words("x", 2, 6), words("y", 2, 6)]


def test_the_fields_extensions_go_through_extra_body(client: openai.OpenAI) -> None:
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True,
        "stop_token_ids": [7], "priority": 9, "guided_choice": ["a", "b"],
    }  # fmt: skip
    answer = client.chat.completions.create(
        model="scripted", messages=HI, max_tokens=3, seed=1, extra_body=extra
    )
    assert answer.choices[0].message.content == words("hi", 1, 3)


def test_models(client: openai.OpenAI) -> None:
    listed = [model.id for model in client.models.list()]
    assert listed == ["scripted", "scripted-alias"]
    assert client.models.retrieve("scripted").owned_by == "loadonce"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


REFUSED: list[tuple[type[openai.APIStatusError], str | None, dict[str, Any]]] = [
    (openai.BadRequestError, "messages", {"messages": []}),
    (openai.BadRequestError, "temperature", {"temperature": 3}),
    (openai.BadRequestError, "max_tokens", {"max_tokens": 1_000_000}),
    (openai.BadRequestError, "reasoning_effort", {"reasoning_effort": "low"}),
    (openai.BadRequestError, "foo", {"extra_body": {"foo": 1}}),
    (openai.NotFoundError, "model", {"model": "nope"}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "param", "fields"), REFUSED)
def test_errors_are_the_clients_own_exceptions(
    client: openai.OpenAI, kind: type[openai.APIStatusError], param: str, fields: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(kind) as refused:
        client.chat.completions.create(**{"model": "scripted", "messages": HI, "stream": stream, **fields})
    assert refused.value.param == param
    assert refused.value.request_id
    assert refused.value.code


def test_a_workers_error_is_told_before_and_inside_a_stream(client: openai.OpenAI) -> None:
    early: list[Any] = [{"role": "user", "content": "@fail=0"}]
    late: list[Any] = [{"role": "user", "content": "@fail=3"}]
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="scripted", messages=early, stream=stream)
    seen = []
    with pytest.raises(openai.APIError):
        for chunk in client.chat.completions.create(model="scripted", messages=late, stream=True):
            seen.append(chunk)
    assert len(seen) == 4  # the role and three words


def test_raw_responses_and_the_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="scripted", messages=HI, max_tokens=2, extra_headers={"X-Request-Id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().choices[0].message.content
    answer = client.chat.completions.create(model="scripted", messages=HI, max_tokens=2)
    assert answer._request_id


def test_c33_a_timeout_ends_its_attempt_so_that_one_runs_at_most(served: HttpPool) -> None:
    slow = {"model": "scripted", "messages": HI, "max_tokens": 5000}
    with served.openai(timeout=0.3, max_retries=2) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**slow)  # type: ignore[call-overload]
    wait_for(lambda: served.running() == 0, "the worker to be free again", 2.0)
    attempts = served.pool.log("http").count('"outcome":"client gone"')
    wait_for(
        lambda: served.pool.log("http").count('"outcome":"client gone"') >= 3, "three attempts in the log"
    )
    assert attempts <= 3


@pytest.mark.parametrize("stream", [False, True])
def test_c24_the_worker_stops_within_a_second_of_the_client_going(served: HttpPool, stream: bool) -> None:
    with served.openai(max_retries=0, timeout=0.5) as client:
        if stream:
            with client.chat.completions.create(
                model="scripted", messages=HI, max_tokens=2000, stream=True, timeout=30
            ) as answer:
                for count, _ in enumerate(answer):
                    if count == 5:
                        break
        else:
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(model="scripted", messages=HI, max_tokens=5000)
    began = time.monotonic()
    wait_for(lambda: served.running() == 0, "the slot to be free", 1.0)
    assert time.monotonic() - began < 3


async def test_the_async_twin(served: HttpPool) -> None:
    async with served.async_openai(max_retries=0) as client:

        async def one(number: int) -> None:
            said: list[Any] = [{"role": "user", "content": f"hello {number}"}]
            if number % 2:
                answer = await client.chat.completions.create(
                    model="scripted", messages=said, max_tokens=8, seed=number
                )
                text = answer.choices[0].message.content
            else:
                text = ""
                async for chunk in await client.chat.completions.create(
                    model="scripted", messages=said, max_tokens=8, seed=number, stream=True
                ):
                    text += chunk.choices[0].delta.content or ""
            assert text == words(f"hello {number}", number, 8)

        await asyncio.gather(*(one(number) for number in range(64)))
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=HI)


async def test_the_async_twin_cancels(served: HttpPool) -> None:
    async with served.async_openai(max_retries=0) as client:
        task = asyncio.ensure_future(
            client.chat.completions.create(model="scripted", messages=HI, max_tokens=5000)
        )
        await asyncio.to_thread(wait_for, lambda: served.running() == 1, "the request to run")
        task.cancel()
        await asyncio.to_thread(wait_for, lambda: served.running() == 0, "the worker to be free", 1.0)


def test_generation_as_people_have_it(served: HttpPool) -> None:
    body = {"prompt": "once upon", "max_new_tokens": 4, "gen_params": {"seed": 5, "do_sample": True}}
    status, answer = served.post("/generation", body)
    assert (status, answer["code"]) == (200, 0)
    assert answer["data"] == [{"generated_text": "once upon" + words("once upon", 5, 4)}]
    status, answer = served.post("/generation", {**body, "prompt": ["a", "b"]})
    assert [one["generated_text"] for one in answer["data"]] == [
        "a" + words("a", 5, 4),
        "b" + words("b", 5, 4),
    ]
    status, answer = served.post("/generation", {"prompt": "@fail=1"})
    assert status == 500
    assert answer["code"] == 500
    assert answer["message"]


def test_tokenize_and_detokenize(served: HttpPool) -> None:
    status, answer = served.post("/tokenize", {"prompt": "one two three"})
    assert status == 200, answer
    assert answer["count"] == len(answer["tokens"]) == 3
    status, answer = served.post("/detokenize", {"tokens": [1, 2]})
    assert status == 200, answer
    assert answer["prompt"]


def test_one_scrape_has_frontend_broker_and_workers(served: HttpPool) -> None:
    served.post("/generation", {"prompt": "x"})
    text = served.get("/metrics")[1]
    for name in (
        "loadonce_http_requests_total",
        "loadonce_time_to_first_token_seconds_bucket",
        "loadonce_e2e_request_latency_seconds_bucket",
        "loadonce_broker_submitted_total",
        "loadonce_worker",
    ):
        assert f"\n{name}" in text, name


def test_not_given_is_absent(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(
        model="scripted",
        messages=HI,
        max_tokens=2,
        temperature=NOT_GIVEN,
        stop=NOT_GIVEN,  # type: ignore[call-overload]
    )
    assert KEY
