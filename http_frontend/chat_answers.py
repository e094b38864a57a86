"""Chunks of the pool as answers of `/v1/chat/completions`, whole or as events. Does no I/O.

An event is put together from bytes that are the same all through the stream, because there is one for each
token of each client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from broker.protocol import Chunk, Outcome, TokenLogprob
from http_frontend.jobs import Result
from http_frontend.openai_types import (
    AnswerMessage,
    CachedTokens,
    CalledFunction,
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    TokenLogprobs,
    ToolCall,
    TopLogprob,
    UsageCount,
)
from http_frontend.sse import event
from http_frontend.tools import CallArguments, CallStart, Content, Delta, ToolText

encode: Final = msgspec.json.Encoder().encode


def logprobs(tokens: Sequence[TokenLogprob]) -> list[TokenLogprobs]:
    """The shape of chat completions."""
    return [
        TokenLogprobs(
            t.token,
            t.logprob,
            t.bytes or None,
            [TopLogprob(rival.token, rival.logprob, rival.bytes or None) for rival in t.top],
        )
        for t in tokens
    ]


def usage(outcomes: Sequence[Outcome], n: int) -> UsageCount:
    """Tokens of a whole request: each prompt counts once, however many choices it has."""
    prompt = sum(o.usage.prompt_tokens for o in outcomes[::n])
    completion = sum(o.usage.completion_tokens for o in outcomes)
    cached = sum(o.usage.cached_tokens for o in outcomes[::n])
    return UsageCount(prompt, completion, prompt + completion, CachedTokens(cached))


def whole(body: ChatRequest, results: Sequence[Result], *, id: str, created: int, model: str) -> ChatResponse:
    """The answer without `stream`."""
    choices = [_choice(body, index, result) for index, result in enumerate(results)]
    total = usage([r.outcome for r in results], len(results))
    answer = ChatResponse(id, created, model, choices, total)
    if body.service_tier is not None:
        answer.service_tier = "default"
    return answer


def _choice(body: ChatRequest, index: int, result: Result) -> ChatChoice:
    chunk = result.chunk
    message = AnswerMessage(chunk.text)
    reader = ToolText.of(body)
    reason: str = result.outcome.finish_reason
    if reader is not None:
        message = _message(reader.push(chunk.text) + reader.finish())
        if reader.calls and reason == "stop":
            reason = "tool_calls"
    found = ChatLogprobs(logprobs(chunk.logprobs or [])) if body.logprobs else None
    return ChatChoice(index, message, found, reason)  # type: ignore[arg-type]


def _message(deltas: Sequence[Delta]) -> AnswerMessage:
    text, calls = "", list[ToolCall]()
    for delta in deltas:
        if isinstance(delta, Content):
            text += delta.text
        elif isinstance(delta, CallStart):
            calls.append(ToolCall(id=delta.id, function=CalledFunction(delta.name, "")))
        else:
            calls[delta.index].function.arguments += delta.text
    if not calls:
        return AnswerMessage(text)
    return AnswerMessage(text or None, calls)


class ChatStream:
    """The events of a streamed chat answer; `jobs.Job` calls it with what the pool says."""

    def __init__(self, body: ChatRequest, *, id: str, created: int, model: str, n: int) -> None:
        options = body.stream_options
        self._wants_usage = bool(options and options.include_usage)
        tier = b',"service_tier":"default"' if body.service_tier is not None else b""
        self._head = (
            b'{"id":%s,"object":"chat.completion.chunk","created":%d,"model":%s,"system_fingerprint":null%s'
            % (encode(id), created, encode(model), tier)
        )
        self._tail = b'],"usage":null}' if self._wants_usage else b"]}"
        self._wants_logprobs = bool(body.logprobs)
        self._tools = [ToolText.of(body) for _ in range(n)]
        self._before = [
            b'%s,"choices":[{"index":%d,"delta":{"content":' % (self._head, index) for index in range(n)
        ]
        self._after = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._outcomes: dict[int, Outcome] = {}
        self._n = n

    def begin(self) -> bytes:
        """The role events, one for each choice."""
        delta = b'{"role":"assistant","content":"","refusal":null}'
        return b"".join(self._event(index, delta) for index in range(self._n))

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """New output of a choice."""
        reader = self._tools[index]
        if reader is not None:
            events = b"".join(self._delta(index, d) for d in reader.push(chunk.text))
            return events + (self._with_logprobs(index, "", chunk) if self._wants_logprobs else b"")
        if self._wants_logprobs:
            return self._with_logprobs(index, chunk.text, chunk)
        if not chunk.text:
            return b""
        return event(self._before[index] + encode(chunk.text) + self._after)

    def end(self, index: int, outcome: Outcome) -> bytes:
        """A choice has ended."""
        self._outcomes[index] = outcome
        reader = self._tools[index]
        events, reason = b"", outcome.finish_reason.encode("ascii")
        if reader is not None:
            events = b"".join(self._delta(index, d) for d in reader.finish())
            if reader.calls and reason == b"stop":
                reason = b"tool_calls"
        return events + self._event(index, b"{}", reason=b'"%s"' % reason)

    def finish(self) -> bytes:
        """All choices have ended: the usage, if it was asked for."""
        if not self._wants_usage:
            return b""
        total = usage([self._outcomes[index] for index in range(self._n)], self._n)
        return event(b'%s,"choices":[],"usage":%s}' % (self._head, encode(total)))

    def _event(
        self, index: int, delta: bytes, *, logprobs: bytes = b"null", reason: bytes = b"null"
    ) -> bytes:
        return event(
            b'%s,"choices":[{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":%s}%s'
            % (self._head, index, delta, logprobs, reason, self._tail)
        )

    def _with_logprobs(self, index: int, text: str, chunk: Chunk) -> bytes:
        if not text and not chunk.logprobs:
            return b""
        found = encode(ChatLogprobs(logprobs(chunk.logprobs or [])))
        return self._event(index, b'{"content":%s}' % encode(text), logprobs=found)

    def _delta(self, index: int, delta: Delta) -> bytes:
        if isinstance(delta, Content):
            return event(self._before[index] + encode(delta.text) + self._after)
        if isinstance(delta, CallArguments):
            call = b'{"index":%d,"function":{"arguments":%s}}' % (delta.index, encode(delta.text))
        else:
            call = b'{"index":%d,"id":%s,"type":"function","function":{"name":%s,"arguments":""}}' % (
                delta.index,
                encode(delta.id),
                encode(delta.name),
            )
        return self._event(index, b'{"tool_calls":[%s]}' % call)
