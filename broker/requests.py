"""From keyword arguments to a request, and from its answer to a completion. Shared by both clients."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from broker import protocol as p
from broker.errors import InvalidRequest, from_validation

Turn = p.ChatMessage | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    Attributes:
        text: what was generated, without the prompt.
        token_ids: the tokens behind it.
        finish_reason: ``stop`` or ``length``.
        usage: tokens counted.
        logprobs: one for each token, if they were asked for.
        seed: the same request with this seed gives the same answer.
        worker: who finished it.
        attempts: workers that began it.
        queued_ms: how long it waited in the broker.
    """

    id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    usage: p.Usage
    logprobs: list[p.TokenLogprob] | None
    stop_reason: str | int | None
    seed: int | None
    worker: str
    attempts: int
    queued_ms: int


def generation(prompt: str | None, token_ids: Sequence[int] | None, params: Mapping[str, Any]) -> p.Request:
    """A request to go on with a text or with tokens.

    Raises:
        InvalidRequest: neither or both were given, or a parameter is wrong; it names the field.
    """
    if (prompt is None) == (token_ids is None):
        raise InvalidRequest("prompt: give exactly one of prompt and token_ids", param="prompt")
    if prompt is not None:
        return p.Request(prompt=_text(prompt, "prompt"), params=to_params(params))
    return p.Request(token_ids=_tokens(token_ids), params=to_params(params))


def tokenization(text: str) -> p.Request:
    """A request for the tokens of a text.

    Raises:
        InvalidRequest: it is no text.
    """
    return p.Request(prompt=_text(text, "text"), task="tokenize")


def detokenization(token_ids: Sequence[int]) -> p.Request:
    """A request for the text of tokens.

    Raises:
        InvalidRequest: they are no list of integers.
    """
    return p.Request(token_ids=_tokens(token_ids), task="detokenize")


def conversation(
    messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, params: Mapping[str, Any]
) -> p.Request:
    """A request for the next turn of a conversation.

    Raises:
        InvalidRequest: there are no messages, or one of them or a parameter is wrong.
    """
    if not messages:
        raise InvalidRequest("messages: at least one is needed", param="messages")
    turned = [m if isinstance(m, p.ChatMessage) else _turn(m, at) for at, m in enumerate(messages)]
    try:
        turns = msgspec.convert(turned, list[p.ChatMessage])
    except msgspec.ValidationError as problem:
        wrong = from_validation(problem)
        raise InvalidRequest(f"messages{wrong.message}", param=f"messages{wrong.param or ''}") from None
    for at, turn in enumerate(turns):
        if turn.content is None and not turn.tool_calls:
            field = f"messages[{at}].content"
            raise InvalidRequest(f"{field}: is missing", param=field)
    listed = None if tools is None else [_map(tool, "tools", at) for at, tool in enumerate(tools)]
    return p.Request(messages=turns, tools=listed, params=to_params(params))


def to_params(given: Mapping[str, Any]) -> p.Params:
    """Parameters from keyword arguments; a `stop` may be one string, a `logit_bias` a map.

    Raises:
        InvalidRequest: a name or a value is wrong; it names the field.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = _biases(values["logit_bias"])
    try:
        return msgspec.convert(values, p.Params)
    except msgspec.ValidationError as problem:
        raise from_validation(problem) from None


def _text(given: object, name: str) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"{name}: expected text, got {type(given).__name__}", param=name)
    return given


def _tokens(given: object) -> list[int]:
    """Token ids of any sequence of integers: a list, an array, a tensor of one dimension."""
    try:
        return [operator.index(token) for token in given]  # type: ignore[attr-defined]
    except TypeError as problem:
        raise InvalidRequest(f"token_ids: expected integers: {problem}", param="token_ids") from None


def _turn(given: object, at: int) -> dict[str, Any]:
    turn = _map(given, "messages", at)
    for key in turn:
        if key not in p.ChatMessage.__struct_fields__:
            field = f"messages[{at}].{key}"
            raise InvalidRequest(f"{field}: there is no such field", param=field)
    return turn


def _map(given: object, name: str, at: int) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        field = f"{name}[{at}]"
        raise InvalidRequest(f"{field}: expected a map, got {type(given).__name__}", param=field)
    return dict(given)


def _biases(given: Mapping[Any, Any]) -> list[tuple[int, Any]]:
    try:
        return [(int(token), bias) for token, bias in given.items()]
    except (TypeError, ValueError):
        raise InvalidRequest("logit_bias: its keys must be token ids", param="logit_bias") from None


def completion(chunks: Sequence[p.Chunk], done: p.Done, outcome: p.Outcome) -> Completion:
    """The whole answer, of its parts in order."""
    whole = p.merge(chunks) if chunks else p.Chunk()
    return Completion(
        id=done.id,
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=outcome.finish_reason,
        usage=outcome.usage,
        logprobs=whole.logprobs,
        stop_reason=outcome.stop_reason,
        seed=outcome.seed,
        worker=done.worker,
        attempts=done.attempts,
        queued_ms=done.queued_ms,
    )
