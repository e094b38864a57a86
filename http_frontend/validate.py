"""A decoded request becomes protocol requests, or an error that names the field. Does no I/O.

Types and ranges were checked when the body was decoded; here is what one field's type can't say: fields
that depend on each other, on the model (context, vocabulary, chat template) or on the settings. The exact
length of a text prompt is known only in the worker, so only what is certain is refused here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Protocol, cast

import msgspec

from broker.errors import ContextTooLong, InvalidRequest, UnsupportedParameter
from broker.protocol import ChatMessage, Grammar, ModelInfo, Params, Request, TextPart
from http_frontend import free_json, tools
from http_frontend.openai_types import (
    CHAT_NOT_SERVED,
    AllowedTools,
    ChatRequest,
    CompletionRequest,
    CustomTool,
    Generation,
    InputMessage,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    TextContent,
)

DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's default for /v1/completions
MAX_BYTES_PER_TOKEN: Final = 1024  # longer tokens are in no vocabulary we know of
_SEED_STEP: Final = 0x9E3779B97F4A7C15  # odd, so that all seeds of one request differ


class Ask(msgspec.Struct):
    """What one HTTP request asks the pool for: `prompts` × `n` requests, prompts first."""

    requests: list[Request]
    n: int


# ── the two OpenAI routes ────────────────────────────────────────────────────────────────────────


def chat(body: ChatRequest, model: ModelInfo, max_n: int) -> Ask:
    """Check a chat request and make its protocol requests.

    Raises:
        InvalidRequest: names the field at fault.
    """
    _refuse_unserved(body)
    n = _choices(body, max_n)
    if not model.chat:
        raise InvalidRequest(
            f"The model {model.name} has no chat template: use /v1/completions.", param="messages"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    shown = tools.for_template(body)  # first: it bounds what the grammar is made of
    params = _params(body, _chat_max_tokens(body), _chat_grammar(body))
    if body.logprobs:
        params.logprobs = body.top_logprobs or 0
    check_params(params, model, "max_completion_tokens" if body.max_tokens is None else "max_tokens")
    messages = conversation(body.messages)
    size = sum(len(message.text) for message in messages)
    _check_text(size, model, "messages")
    request = Request(
        messages=messages,
        tools=shown,
        add_generation_prompt=body.add_generation_prompt is not False,
        params=params,
    )
    return Ask(seeded([request], n, body.seed), n)


def completion(body: CompletionRequest, model: ModelInfo, max_n: int) -> Ask:
    """Check a completion request and make its protocol requests.

    Raises:
        InvalidRequest: names the field at fault.
    """
    n = _choices(body, max_n)
    if body.best_of is not None and body.best_of != n:
        raise UnsupportedParameter("best_of: only the value of n is served.", param="best_of")
    if body.suffix:
        raise UnsupportedParameter("suffix: the models here only continue.", param="suffix")
    params = _params(body, _completion_max_tokens(body), _grammar(body, body.response_format))
    params.logprobs = body.logprobs
    if body.echo:
        params.echo = True
        params.prompt_logprobs = body.logprobs
    found = prompts(body.prompt, max_n)
    if len(found) * n > max_n:
        raise InvalidRequest(f"prompt: {len(found)} prompts × n {n} are more than {max_n}.", param="prompt")
    check_params(params, model, "max_tokens")
    for request in found:
        request.params = params
        check_prompt(request, model)
    return Ask(seeded(found, n, body.seed), n)


def prompts(given: str | Sequence[str | int | list[int]], most: int) -> list[Request]:
    """Tell the four shapes of a prompt apart; each becomes requests with `prompt` or `token_ids`.

    Raises:
        InvalidRequest: it is empty, mixed, or has more than `most` prompts.
    """
    if isinstance(given, str):
        listed: list[str | list[int]] = [given]
    else:
        kinds = set(map(type, given))
        if len(kinds) > 1:
            raise InvalidRequest(
                "prompt: texts, token ids and lists of token ids can't be mixed.", param="prompt"
            )
        listed = [cast("list[int]", list(given))] if kinds == {int} else cast("list[str | list[int]]", given)
    if not listed or not all(listed):
        raise InvalidRequest("prompt: must not be empty.", param="prompt")
    if len(listed) > most:
        raise InvalidRequest(f"prompt: {len(listed)} prompts, at most {most} are allowed.", param="prompt")
    return [Request(prompt=p) if isinstance(p, str) else Request(token_ids=p) for p in listed]


def conversation(messages: Sequence[InputMessage]) -> list[ChatMessage]:
    """The messages as templates want them: `developer` is `system`, call arguments are objects.

    Raises:
        InvalidRequest: names the message and field.
    """
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def tokens_in_vocabulary(ids: Sequence[int], model: ModelInfo, param: str) -> None:
    """Check token ids against the model.

    Raises:
        InvalidRequest: names the first id that the model hasn't.
    """
    if not ids or (min(ids) >= 0 and max(ids) < model.vocab):
        return
    place, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < model.vocab)
    raise InvalidRequest(f"{param}[{place}]: {wrong} is not a token id: 0 to {model.vocab - 1}.", param=param)


# ── parts ────────────────────────────────────────────────────────────────────────────────────────


def _refuse_unserved(body: ChatRequest) -> None:
    if _unserved_values(body) != _NO_UNSERVED:
        name = next(name for name in CHAT_NOT_SERVED if getattr(body, name) is not None)
        raise UnsupportedParameter(f"{name}: not served here: {CHAT_NOT_SERVED[name]}.", param=name)
    if body.store:
        raise UnsupportedParameter("store: nothing is stored here.", param="store")
    if body.modalities is not None and body.modalities != ["text"]:
        raise UnsupportedParameter("modalities: the models here write text.", param="modalities")
    if body.service_tier not in (None, "auto", "default"):
        raise UnsupportedParameter("service_tier: only auto and default.", param="service_tier")
    if isinstance(body.tool_choice, AllowedTools | CustomTool):
        kind = body.tool_choice.__struct_config__.tag
        raise UnsupportedParameter(f"tool_choice: {kind} isn't served here.", param="tool_choice")
    if body.parallel_tool_calls is False and body.tools is None:
        raise InvalidRequest("parallel_tool_calls: needs tools.", param="parallel_tool_calls")


def _choices(body: Generation, max_n: int) -> int:
    n = body.n or 1
    if n > max_n:
        raise InvalidRequest(f"n: {n} is more than {max_n}.", param="n")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream to be true.", param="stream_options")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise UnsupportedParameter(
            "stream_options.include_obfuscation: not served here.", param="stream_options.include_obfuscation"
        )
    return n


def _chat_max_tokens(body: ChatRequest) -> int | None:
    given = {v for v in (body.max_tokens, body.max_completion_tokens) if v is not None}
    if len(given) > 1:
        raise InvalidRequest("max_tokens and max_completion_tokens differ.", param="max_tokens")
    value = given.pop() if given else None
    if value == 0:
        param = "max_tokens" if body.max_tokens == 0 else "max_completion_tokens"
        raise InvalidRequest(f"{param}: must be at least 1.", param=param)
    return value


def _completion_max_tokens(body: CompletionRequest) -> int:
    if body.max_tokens is None:
        return max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens: 0 is of use only with echo.", param="max_tokens")
    return body.max_tokens


def _chat_grammar(body: ChatRequest) -> Grammar | None:
    grammar, forced = _grammar(body, body.response_format), tools.forced_grammar(body)
    if forced is not None and grammar is not None:
        raise InvalidRequest("tool_choice can't be forced beside another format.", param="tool_choice")
    return forced or grammar


# The fields of `Generation` that go into `Params` under the same name when they are given.
_SAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
)
# One call for all of them: most requests set few or none.
_same_values: Final = attrgetter(*_SAME)
_NOTHING_SAME: Final = (None,) * len(_SAME)
_unserved_values: Final = attrgetter(*CHAT_NOT_SERVED)
_NO_UNSERVED: Final = (None,) * len(CHAT_NOT_SERVED)


def _params(body: Generation, max_tokens: int | None, grammar: Grammar | None) -> Params:
    params = Params(max_tokens=max_tokens, grammar=grammar)
    values = _same_values(body)
    if values != _NOTHING_SAME:
        for name, value in zip(_SAME, values, strict=True):
            if value is not None:
                setattr(params, name, value)
    if body.stop:
        params.stop = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.logit_bias:
        params.logit_bias = _bias(body.logit_bias)
    params.include_stop = bool(body.include_stop_str_in_output)
    return params


def _bias(given: Mapping[str, float]) -> list[tuple[int, float]]:
    found = []
    for text, value in given.items():
        if not (text.isascii() and text.isdecimal() and len(text) <= 10):
            raise InvalidRequest(f"logit_bias: {text!r} is not a token id.", param="logit_bias")
        found.append((int(text), value))
    return found


class _Guided(Protocol):
    @property
    def guided_json(self) -> Any: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...


def _grammar(body: _Guided, wanted: ResponseFormat | None) -> Grammar | None:
    given: dict[str, Grammar] = {}
    if isinstance(wanted, JsonObjectFormat):
        given["response_format"] = Grammar("json_object")
    elif isinstance(wanted, JsonSchemaFormat):
        given["response_format"] = json_schema(wanted.json_schema.schema or {}, "response_format")
    if body.guided_json is not None:
        given["guided_json"] = _guided_json(body.guided_json)
    if body.guided_regex is not None:
        given["guided_regex"] = Grammar("regex", body.guided_regex)
    if body.guided_choice is not None:
        given["guided_choice"] = Grammar("lark", _one_of(body.guided_choice))
    if body.guided_grammar is not None:
        given["guided_grammar"] = Grammar("lark", body.guided_grammar)
    if len(given) > 1:
        second = list(given)[1]
        raise InvalidRequest(f"{second}: only one format can be asked for.", param=second)
    return next(iter(given.values()), None)


def json_schema(schema: Any, param: str) -> Grammar:
    """A grammar from a JSON schema.

    Raises:
        InvalidRequest: it is past the bounds of `free_json`.
    """
    free_json.check(schema, param)
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _guided_json(given: Any) -> Grammar:
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as problem:
            raise InvalidRequest(f"guided_json: {problem}.", param="guided_json") from None
    if not isinstance(given, dict):
        raise InvalidRequest("guided_json: a JSON schema is an object.", param="guided_json")
    return json_schema(given, "guided_json")


def _one_of(texts: Sequence[str]) -> str:
    return "start: " + " | ".join(msgspec.json.encode(text).decode() for text in texts)


def check_params(params: Params, model: ModelInfo, max_name: str) -> None:
    """What depends on the model; `max_name` is what the request calls its max_tokens.

    Raises:
        InvalidRequest: names the field at fault.
    """
    limit = params.max_tokens
    if limit is not None and limit >= model.context:
        raise ContextTooLong(
            f"{max_name}: the model's context is {model.context} tokens, prompt and output together; "
            f"{limit} were asked for beside the prompt.",
            param=max_name,
        )
    if params.min_tokens > (model.context if limit is None else limit):
        raise InvalidRequest("min_tokens: more than max_tokens.", param="min_tokens")
    tokens_in_vocabulary([token for token, _ in params.logit_bias], model, "logit_bias")
    tokens_in_vocabulary(params.stop_token_ids, model, "stop_token_ids")


def check_prompt(request: Request, model: ModelInfo) -> None:
    """Refuse what certainly can't fit, and ids outside the vocabulary.

    Raises:
        InvalidRequest: names `prompt`.
    """
    if request.token_ids is None:
        _check_text(len(request.prompt or ""), model, "prompt")
        return
    tokens_in_vocabulary(request.token_ids, model, "prompt")
    size, wanted = len(request.token_ids), request.params.max_tokens or 0
    if size + wanted > model.context:
        raise ContextTooLong(
            f"prompt: the model's context is {model.context} tokens; the prompt has {size} and "
            f"{wanted} were asked for.",
            param="prompt",
        )


def _check_text(chars: int, model: ModelInfo, param: str) -> None:
    if chars > model.context * MAX_BYTES_PER_TOKEN:
        raise ContextTooLong(
            f"{param}: {chars} characters can't fit into the model's context of {model.context} tokens.",
            param=param,
        )


def seeded(requests: Sequence[Request], n: int, seed: int | None) -> list[Request]:
    """Each request n times, every one with its own seed, all derived from the first."""
    first = random.getrandbits(63) if seed is None else seed
    if n == 1 and len(requests) == 1:
        requests[0].params.seed = first
        return list(requests)
    made = []
    for number in range(len(requests) * n):
        request = requests[number // n]
        wrapped = (first + (number % n) * _SEED_STEP + 2**63) % 2**64 - 2**63
        params = msgspec.structs.replace(request.params, seed=wrapped)
        made.append(msgspec.structs.replace(request, params=params))
    return made


def _message(given: InputMessage, where: str) -> ChatMessage:
    content: str | list[TextPart] | None
    if isinstance(given.content, list):
        content = [TextPart(p.text if isinstance(p, TextContent) else p.refusal) for p in given.content]
    else:
        content = given.content if given.content is not None else given.refusal
    if content is None and not given.tool_calls:
        raise InvalidRequest(f"{where}.content: missing.", param=f"{where}.content")
    if given.tool_calls is not None and given.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only an assistant calls.", param=f"{where}.tool_calls")
    role = "system" if given.role == "developer" else given.role
    calls = tools.sent_back(given.tool_calls, where) if given.tool_calls else None
    return ChatMessage(role, content, given.name, calls, given.tool_call_id)
