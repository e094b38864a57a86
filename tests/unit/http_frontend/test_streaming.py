"""Streams as clients see them. Section B of the field cases, on a fake pool that says what the test wants."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from broker.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from broker.protocol import TokenLogprob
from tests.unit.http_frontend.fake_pool import FakePool, Submitted, echo
from tests.unit.http_frontend.serving import CHAT, COMPLETIONS, Served, parse_events, serving, user

NASTY = ["a\nb", "c\rd", "\r\n\r\n", "data: x", "\u2028", "\u2029", "\x85", "\x0b\x0c\x1c", "🫠", '"\\', ""]


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as one:
        yield one


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def nothing(got: Submitted) -> None:
    """A pool that keeps silent until the test speaks for it."""


async def test_a_chat_stream_is_role_text_reason_done(served: Served) -> None:
    events = await served.events(CHAT, messages=[user("one two")])
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "one "},
        {"content": "two "},
        {},
    ]
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None, None, None, "stop"]
    assert events[-1] == "[DONE]"
    assert len({event["id"] for event in events[:-1]}) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_c17_each_choice_has_its_index_and_one_reason(served: Served, path: str) -> None:
    fields = {"n": 2, "max_tokens": 4} | ({} if path == CHAT else {"prompt": "a b c"})
    events = await served.events(path, **fields)
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1]]
    assert {choice["index"] for choice in choices} == {0, 1}
    for index in (0, 1):
        reasons = [c["finish_reason"] for c in choices if c["index"] == index]
        assert [r for r in reasons if r] == ["stop"]
        assert reasons[-1] == "stop"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_c19_usage_comes_once_and_only_when_asked_for(
    served: Served, path: str, options: dict[str, bool] | None
) -> None:
    fields: dict[str, Any] = {"stream_options": options} | ({} if path == CHAT else {"prompt": "hi"})
    events = await served.events(path, **fields)
    assert all("choices" in event for event in events[:-1])
    if options and options["include_usage"]:
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["total_tokens"] == 4
        assert all(event["usage"] is None for event in events[:-2])
    else:
        assert all(event["choices"] for event in events[:-1])
        assert not any("usage" in event for event in events[:-1])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_c21_every_event_is_one_object_whatever_the_text(path: str) -> None:
    def script(got: Submitted) -> None:
        for text in NASTY:
            got.say(text)
        got.end()

    async with serving(FakePool(script)) as served:
        events = await served.events(path, **({} if path == CHAT else {"prompt": "hi"}))
        choices = [event["choices"][0] for event in events[:-1]]
        texts = [c["delta"].get("content", "") if path == CHAT else c["text"] for c in choices]
        assert "".join(texts) == "".join(NASTY)


async def test_c21_an_error_in_the_middle_is_one_whole_event() -> None:
    async with serving(FakePool(nothing)) as served:
        asked = asyncio.ensure_future(served.events(CHAT))
        await until(lambda: bool(served.pool.submitted))
        got = served.pool.submitted[0]
        got.say("some ")
        await until(lambda: served.frontend.metrics.streams == 1)
        got.say("text")
        got.fail(InternalError("the worker fell over"))
        events = await asked
        assert events[-1]["error"]["message"] == "the worker fell over"
        assert events[-1]["error"]["code"] == "internal_error"
        assert "[DONE]" not in events
        assert (await served.get("/health"))[0] == 200


async def test_c22_headers_keep_proxies_from_buffering(served: Served) -> None:
    async with served.http.post(CHAT, json={"messages": [user("x")], "stream": True}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-cache"
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert answer.headers["X-Request-Id"]


async def test_c22_the_first_token_arrives_before_the_last_is_made() -> None:
    pool = FakePool(nothing)
    async with serving(pool) as served:
        asked = asyncio.ensure_future(served.http.post(CHAT, json={"messages": [user("x")], "stream": True}))
        await until(lambda: bool(pool.submitted))
        assert not asked.done()  # headers wait for the first word, so that a refusal can be plain
        pool.submitted[0].say("first")
        async with await asked as answer:
            seen = b""
            while b"first" not in seen:
                seen += await answer.content.readany()
            pool.submitted[0].say("last")
            pool.submitted[0].end()
            rest = await answer.read()
            assert b"last" in rest


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_first_token_is_plain_json(stream: bool) -> None:
    pool = FakePool(lambda got: got.fail(ContextTooLong("too long", param="messages")))
    async with serving(pool) as served:
        status, answer = await served.chat(stream=stream)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert answer["error"]["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
async def test_c13_what_a_template_refuses_is_400_in_its_own_words(stream: bool) -> None:
    said = "Conversation roles must alternate user/assistant/user/assistant/..."
    pool = FakePool(lambda got: got.fail(InvalidRequest(said, param="messages")))
    async with serving(pool) as served:
        status, answer = await served.chat(messages=[user("a"), user("b")], stream=stream)
        assert status == 400
        assert answer["error"]["message"] == said


@pytest.mark.parametrize(
    ("problem", "status", "retry"),
    [
        (Overloaded("full", retry_after_ms=2500), 429, "3"),
        (Unavailable("no worker"), 503, "1"),
        (DeadlineExceeded("late"), 504, None),
        (InternalError("?"), 500, None),
    ],
)
async def test_c33_overload_and_absence_say_when_to_come_again(
    problem: Any, status: int, retry: str | None
) -> None:
    async with serving(FakePool(lambda got: got.fail(problem))) as served:
        got, answer, headers = await served.post(CHAT, {"messages": [user("x")]})
        assert got == status
        assert headers.get("Retry-After") == retry
        assert answer["error"]["code"] == problem.code
        got, answer, headers = await served.post("/generation", {"prompt": "x"})
        assert (got, answer["code"], headers.get("Retry-After")) == (status, status, retry)


async def test_when_one_choice_fails_the_others_are_cancelled() -> None:
    def script(got: Submitted) -> None:
        if len(pool.submitted) == 2:
            got.fail(Overloaded("full"))

    pool = FakePool(script)
    async with serving(pool) as served:
        status, _ = await served.chat(n=3)
        assert status == 429
        assert pool.submitted[0].submit.id in pool.cancelled


@pytest.mark.parametrize("stream", [False, True])
async def test_c24_a_client_that_goes_away_cancels_its_request(stream: bool) -> None:
    pool = FakePool(nothing)
    async with serving(pool) as served:
        asked = asyncio.ensure_future(
            served.http.post(CHAT, json={"messages": [user("x")], "stream": stream, "n": 2})
        )
        await until(lambda: len(pool.submitted) == 2)
        if stream:
            pool.submitted[0].say("x")
            (await asked).close()
        else:
            asked.cancel()
        await until(lambda: len(set(pool.cancelled)) == 2, 1.0)
        assert set(pool.cancelled) == {got.submit.id for got in pool.submitted}
        await until(lambda: served.frontend.metrics.in_hand == 0)
        served.frontend.access.flush()
        assert '"outcome":"client gone"' in served.pool.access.getvalue()


async def test_a_heartbeat_comes_when_the_model_is_silent() -> None:
    pool = FakePool(lambda got: got.say("x"))
    async with serving(pool, heartbeat_s=0.05) as served:
        async with served.http.post(CHAT, json={"messages": [user("x")], "stream": True}) as answer:
            seen = b""
            async with asyncio.timeout(5):
                while seen.count(b": still here\n\n") < 2:
                    seen += await answer.content.readany()
            pool.submitted[0].end()
            seen += await answer.read()
        assert parse_events(seen)[-1] == "[DONE]"


async def test_c28_a_slow_reader_is_dropped_and_fast_ones_dont_notice() -> None:
    pool = FakePool(nothing)
    async with serving(pool, stream_buffer_bytes=65536) as served:
        body = json.dumps({"messages": [user("x")], "stream": True}).encode()
        slow = socket.create_connection(("127.0.0.1", served.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await until(lambda: bool(pool.submitted))
        talker = pool.submitted[0]
        async with asyncio.timeout(20):
            while not pool.cancelled:
                talker.say("word " * 1000)
                await asyncio.sleep(0)
        assert pool.cancelled == [talker.submit.id]
        slow.close()
        await until(lambda: served.frontend.metrics.slow_readers == 1)
        assert "slow reader" in served.pool.log.getvalue()
        pool.script = echo
        assert (await served.events(CHAT))[-1] == "[DONE]"


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_echoed_prompts_of_any_size_reach_a_reader_who_takes_them() -> None:
    prompts = ["word " * count for count in [12_900] * 60]

    def script(got: Submitted) -> None:
        got.say("x", prompt_text=got.request.prompt)
        got.end()

    async with serving(FakePool(script), stream_buffer_bytes=65536) as served:
        events = await served.events(COMPLETIONS, prompt=prompts, echo=True, max_tokens=1)
        assert events[-1] == "[DONE]"
        choices = [event["choices"][0] for event in events[:-1]]
        texts = ["".join(c["text"] for c in choices if c["index"] == i) for i in range(len(prompts))]
        assert texts == [prompt + "x" for prompt in prompts]


async def test_http_1_0_gets_a_stream_that_ends_with_the_connection() -> None:
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = json.dumps({"messages": [user("x")], "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        head, _, events = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"chunked" not in head
        assert parse_events(events)[-1] == "[DONE]"


LOGPROBS = [
    TokenLogprob(5, "x", -0.5, [120], [TokenLogprob(5, "x", -0.5, [120]), TokenLogprob(6, "y", -1.5, [121])])
]


def with_logprobs(got: Submitted) -> None:
    got.say("x", logprobs=LOGPROBS)
    got.end("length")


async def test_logprobs_of_chat_have_their_shape_whole_and_streamed() -> None:
    async with serving(FakePool(with_logprobs)) as served:
        _, answer = await served.chat(logprobs=True, top_logprobs=2)
        whole = answer["choices"][0]["logprobs"]["content"]
        events = await served.events(CHAT, logprobs=True, top_logprobs=2)
        assert [
            e["choices"][0]["logprobs"]["content"] for e in events[:-1] if e["choices"][0]["logprobs"]
        ] == [whole]
        assert whole[0]["token"] == "x"
        assert whole[0]["bytes"] == [120]
        assert [rival["token"] for rival in whole[0]["top_logprobs"]] == ["x", "y"]
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_logprobs_of_completions_have_their_shape_whole_and_streamed() -> None:
    def script(got: Submitted) -> None:
        prompt = [None, TokenLogprob(9, "lo", -0.1)]
        got.say("x", logprobs=LOGPROBS, prompt_text="hello", prompt_logprobs=prompt)
        got.say("x", logprobs=LOGPROBS)
        got.end()

    async with serving(FakePool(script)) as served:
        body = {"prompt": "hello", "logprobs": 2, "echo": True}
        _, answer, _ = await served.post(COMPLETIONS, body)
        got = answer["choices"][0]
        assert got["text"] == "helloxx"
        assert got["logprobs"]["tokens"] == ["hel", "lo", "x", "x"]
        assert got["logprobs"]["token_logprobs"] == [None, -0.1, -0.5, -0.5]
        assert got["logprobs"]["text_offset"] == [0, 3, 5, 6]
        assert got["logprobs"]["top_logprobs"][2] == {"x": -0.5, "y": -1.5}
        events = await served.events(COMPLETIONS, **body)
        parts = [e["choices"][0]["logprobs"] for e in events[:-1] if e["choices"][0]["logprobs"]]
        assert [offset for part in parts for offset in part["text_offset"]] == [0, 3, 5, 6]
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "helloxx"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def test_a_tool_call_is_told_whole_and_streamed() -> None:
    def script(got: Submitted) -> None:
        for piece in ("Well. <tool", '_call>{"name": "add", "argu', 'ments": {"a": 1}}</tool', "_call>"):
            got.say(piece)
        got.end()

    async with serving(FakePool(script)) as served:
        _, answer = await served.chat(tools=TOOLS)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"].strip() == "Well."
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        events = await served.events(CHAT, tools=TOOLS)
        deltas = [e["choices"][0]["delta"] for e in events[:-1]]
        calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
        assert calls[0]["function"]["name"] == "add"
        assert calls[0]["id"]
        assert "".join(c["function"]["arguments"] for c in calls) == '{"a": 1}'
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
        sent = served.pool.submitted[0].request
        assert sent.tools == TOOLS


async def test_a_forced_call_is_read_from_its_grammar() -> None:
    def script(got: Submitted) -> None:
        assert got.request.params.grammar is not None
        got.say('{"a": 1}')
        got.end()

    async with serving(FakePool(script)) as served:
        choice = {"type": "function", "function": {"name": "add"}}
        _, answer = await served.chat(tools=TOOLS, tool_choice=choice)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


async def test_a_fault_in_our_own_code_is_logged_whole_and_told_neutrally(served: Served) -> None:
    def script(got: Submitted) -> None:
        raise ZeroDivisionError("secret")

    served.pool.script = script
    status, answer = await served.chat()
    assert status == 500
    assert "secret" not in json.dumps(answer)
    log = served.pool.log.getvalue()
    assert "ZeroDivisionError: secret" in log


async def test_draining_says_so_finishes_and_closes(served: Served) -> None:
    pool = served.pool
    pool.script = nothing
    asked = asyncio.ensure_future(served.chat())
    await until(lambda: bool(pool.submitted))
    served.frontend.draining = True
    status, _, headers = await served.get("/ready")
    assert status == 503
    assert headers["Connection"] == "close"
    assert (await served.get("/health"))[0] == 200
    pool.submitted[0].say("x")
    pool.submitted[0].end()
    assert (await asked)[0] == 200


async def test_a_request_id_is_kept_or_made(served: Served) -> None:
    _, _, headers = await served.get("/health", headers={"X-Request-Id": "mine-1"})
    assert headers["X-Request-Id"] == "mine-1"
    for bad in ("x" * 65, "a b", "ä"):
        _, _, headers = await served.get("/health", headers={"X-Request-Id": bad})
        assert headers["X-Request-Id"] not in ("", bad)
    await served.post(CHAT, {"messages": [user("x")]}, headers={"X-Request-Id": "mine-2"})
    await served.post(CHAT, {"messages": [user("x")]}, headers={"X-Request-Id": "mine-2"})
    first, second = (got.submit.id for got in served.pool.submitted)
    assert first.startswith("mine-2.")
    assert first != second


async def test_the_trace_context_reaches_the_worker(served: Served) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await served.post(CHAT, {"messages": [user("x")]}, headers={"traceparent": parent})
    await served.post(CHAT, {"messages": [user("x")]}, headers={"traceparent": "nonsense"})
    assert [got.request.traceparent for got in served.pool.submitted] == [parent, ""]


async def test_prompts_are_not_in_the_log(served: Served) -> None:
    await served.chat(messages=[user("my secret")], user="alice\u2028")
    served.frontend.access.flush()
    line = served.pool.access.getvalue()
    assert "secret" not in line
    assert line.isascii()
    assert json.loads(line)["user"] == "alice\u2028"


async def test_connections_past_the_limit_are_refused() -> None:
    async with serving(max_connections=2) as served:
        held = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too_many_connections" in answer
        for _, other in [*held, (reader, writer)]:
            other.close()


async def test_every_answer_is_counted(served: Served) -> None:
    await served.get("/health")
    status, text, _ = await served.get("/metrics")
    assert status == 200
    assert 'route="/health",status="200"} 1.0' in text
