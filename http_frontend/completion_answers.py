"""Chunks of the pool as answers of `/v1/completions`, whole or as events. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from broker.protocol import Chunk, Outcome, TokenLogprob
from http_frontend.chat_answers import usage
from http_frontend.jobs import Result
from http_frontend.openai_types import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from http_frontend.sse import event

encode: Final = msgspec.json.Encoder().encode


class Logprobs:
    """Makes the shape of completions piece by piece; offsets count characters of the choice's tokens."""

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._offset = 0

    def of(self, chunk: Chunk) -> CompletionLogprobs | None:
        """Those of a chunk, an echoed prompt's first; None if it has none."""
        listed: list[TokenLogprob | None] = [*(chunk.prompt_logprobs or []), *(chunk.logprobs or [])]
        if not listed:
            return None
        made = CompletionLogprobs([], [], [] if self._alternatives else None, [])
        for place, token in enumerate(listed):
            self._add(made, token, _first_token(chunk, place))
        return made

    def _add(self, made: CompletionLogprobs, token: TokenLogprob | None, unknown: str) -> None:
        text = token.token if token else unknown
        made.tokens.append(text)
        made.token_logprobs.append(token.logprob if token else None)
        made.text_offset.append(self._offset)
        self._offset += len(text)
        if made.top_logprobs is not None:
            made.top_logprobs.append({t.token: t.logprob for t in token.top} if token else None)


def _first_token(chunk: Chunk, place: int) -> str:
    """The text of a prompt's first token, which has no log-probability: what the others leave over."""
    if place or not chunk.prompt_text:
        return ""
    rest = "".join(t.token for t in chunk.prompt_logprobs or [] if t)
    return chunk.prompt_text.removesuffix(rest) if chunk.prompt_text.endswith(rest) else ""


def whole(
    body: CompletionRequest, results: Sequence[Result], *, id: str, created: int, model: str
) -> CompletionResponse:
    """The answer without `stream`."""
    choices = [
        CompletionChoice(
            index,
            (result.chunk.prompt_text or "") + result.chunk.text,
            None if body.logprobs is None else Logprobs(body.logprobs).of(result.chunk),
            result.outcome.finish_reason,
        )
        for index, result in enumerate(results)
    ]
    total = usage([r.outcome for r in results], body.n or 1)
    return CompletionResponse(id, created, model, choices, total)


class CompletionStream:
    """The events of a streamed completion; `jobs.Job` calls it with what the pool says."""

    def __init__(self, body: CompletionRequest, *, id: str, created: int, model: str, count: int) -> None:
        options = body.stream_options
        self._wants_usage = bool(options and options.include_usage)
        self._head = (
            b'{"id":%s,"object":"text_completion","created":%d,"model":%s,"system_fingerprint":null'
            % (encode(id), created, encode(model))
        )
        self._tail = b'],"usage":null}' if self._wants_usage else b"]}"
        alternatives = body.logprobs
        self._logprobs = [] if alternatives is None else [Logprobs(alternatives) for _ in range(count)]
        self._before = [b'%s,"choices":[{"index":%d,"text":' % (self._head, index) for index in range(count)]
        self._after = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._outcomes: dict[int, Outcome] = {}
        self._count, self._n = count, body.n or 1

    def begin(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """New output of a choice."""
        text = (chunk.prompt_text or "") + chunk.text
        if not self._logprobs:
            return event(self._before[index] + encode(text) + self._after) if text else b""
        found = self._logprobs[index].of(chunk)
        if not text and found is None:
            return b""
        return self._event(index, text, encode(found), b"null")

    def end(self, index: int, outcome: Outcome) -> bytes:
        """A choice has ended."""
        self._outcomes[index] = outcome
        return self._event(index, "", b"null", b'"%s"' % outcome.finish_reason.encode("ascii"))

    def finish(self) -> bytes:
        """All choices have ended: the usage, if it was asked for."""
        if not self._wants_usage:
            return b""
        total = usage([self._outcomes[index] for index in range(self._count)], self._n)
        return event(b'%s,"choices":[],"usage":%s}' % (self._head, encode(total)))

    def _event(self, index: int, text: str, logprobs: bytes, reason: bytes) -> bytes:
        return event(
            b'%s%s,"logprobs":%s,"finish_reason":%s}%s'
            % (self._before[index], encode(text), logprobs, reason, self._tail)
        )
