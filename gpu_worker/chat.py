"""From a request's prompt, tokens or conversation to token ids, by the model's own tokenizer and template.

Policy for special-token text: a raw `prompt` is tokenised as transformers does it, special tokens included,
since completions are how people drive a template of their own; one that spells the beginning-of-text token
itself doesn't get a second one. In a conversation nothing that a caller
wrote becomes a control token: where a message spells one, it is broken in two before tokenising, so that
the model sees its letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import jinja2

from broker.errors import InvalidRequest
from broker.protocol import ChatMessage, Request

#: Private-use characters that mark where a spelled control token is broken; the first that nobody wrote.
_MARKS: Final = tuple(chr(code) * 2 for code in range(0xE0F1, 0xE0FF))


class Prompts:
    """Encodes requests for one model.

    Args:
        tokenizer: a fast tokenizer; used in the calling thread only.
        config: the model's config; unused by most, kept for templates that ask for it.
    """

    def __init__(self, tokenizer: Any, config: Any = None) -> None:
        self._tokenizer = tokenizer
        self._control = sorted(_control_strings(tokenizer), key=len, reverse=True)

    def encode(self, request: Request) -> list[int]:
        """The prompt's token ids.

        Raises:
            InvalidRequest: the text isn't valid Unicode, the model has no chat template, or its template
                refuses the conversation; names the field.
        """
        if request.token_ids is not None:
            return list(request.token_ids)
        if request.messages is not None:
            return self._encode_chat(request, request.messages)
        ids = self._ids(_valid(request.prompt or "", "prompt"), add_special_tokens=True)
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    # ── conversations ────────────────────────────────────────────────────────────────────────────

    def _encode_chat(self, request: Request, messages: list[ChatMessage]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "messages: this model has no chat template; send a prompt to the completion route",
                param="messages",
            )
        turns = [_turn(message, number) for number, message in enumerate(messages)]
        tools = request.tools
        written = list(_strings([turns, tools]))
        for text in written:
            _valid(text, "messages")
        spelled = [control for control in self._control if any(control in text for text in written)]
        if not spelled:
            rendered = self._render(turns, tools, request.add_generation_prompt)
            return self._ids(rendered, add_special_tokens=False)
        mark = next((m for m in _MARKS if not any(m in text for text in written)), None)
        if mark is None:
            raise InvalidRequest("messages: they use every private character that we know", param="messages")
        rendered = self._render(
            _broken(turns, spelled, mark), _broken(tools, spelled, mark), request.add_generation_prompt
        )
        # Each part is tokenised on its own, so no part of a spelled control token meets its other half.
        parts = [self._ids(part, add_special_tokens=False) for part in rendered.split(mark)]
        return [id for part in parts for id in part]

    def _render(self, turns: Any, tools: Any, add_generation_prompt: bool) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as problem:
            raise InvalidRequest(
                f"messages: the model's chat template says: {problem}", param="messages"
            ) from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as problem:
            raise InvalidRequest(
                f"messages: the model's chat template can't take them: {problem}", param="messages"
            ) from None
        return rendered


def _control_strings(tokenizer: Any) -> set[str]:
    """How the special tokens are spelled. One of a single character can't be broken in two."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {text for text in added | set(tokenizer.all_special_tokens) if len(text) > 1}


def _turn(message: ChatMessage, number: int) -> dict[str, Any]:
    """A message as templates expect it: content as text, arguments of tool calls as objects."""
    if not message.role:
        raise InvalidRequest(f"messages[{number}].role: it is empty", param=f"messages[{number}].role")
    turn: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls is not None:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _strings(value: Any) -> Iterator[str]:
    """Every string in a tree of lists and dicts, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _broken(value: Any, spelled: list[str], mark: str) -> Any:
    """The same tree, with a mark after the first character of each control token that it spells."""
    if isinstance(value, str):
        for control in spelled:
            value = value.replace(control, control[0] + mark + control[1:])
        return value
    if isinstance(value, dict):
        return {_broken(k, spelled, mark): _broken(v, spelled, mark) for k, v in value.items()}
    if isinstance(value, list):
        return [_broken(inner, spelled, mark) for inner in value]
    return value


def _valid(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field}: not valid Unicode (half a surrogate pair)", param=field) from None
    return text
