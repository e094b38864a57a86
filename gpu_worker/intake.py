"""A `Run` command → the sequence to generate, or the answer, or the error. Knows nothing of steps or pages.

Everything that can be wrong with a request is found here, before the model sees it.

The rule of defaults: a value in the request always wins, also when it equals a library's default. Where the
request says nothing, the model's own generation_config counts; where that says nothing, temperature 1.0,
top_p 1.0, no top_k, no min_p, repetition_penalty 1.0. `describe_defaults` words it for the log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from broker import protocol
from broker.errors import ContextTooLong, InvalidRequest
from broker.protocol import Chunk, Outcome, Params, Request, Usage

from . import exchange
from .chat import Prompts
from .grammar import Grammars
from .sequence import Ending, SamplingParams, Sequence
from .text import TextStream

if TYPE_CHECKING:
    from .loading import LoadedModel, SamplingDefaults

T = TypeVar("T")

_SOURCES: Final = ("prompt", "token_ids", "messages")
#: More than a token of usual text has; a text with more than the context times this is looked at first.
_CHARACTERS_PER_TOKEN: Final = 16
#: What the shortest token's log-probability takes on the wire.
_REPORT_BYTES: Final = 36
#: Prompt tokens that the first output tokens are decoded after, for the space between them.
_TEXT_CONTEXT: Final = 5
#: What counts where neither the request nor the model says anything.
_NEUTRAL: Final = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Answer:
    """All that is to be said about a request that needs no step of the model."""

    chunk: Chunk | None
    outcome: Outcome


def describe_defaults(defaults: SamplingDefaults) -> str:
    """The rule of defaults for this model, as one line for the log."""
    values = ", ".join(f"{name} {_default(defaults, name)}" for name in _NEUTRAL)
    return f"a value in the request always wins; without one: {values}"


def outcome(sequence: Sequence, ending: Ending) -> Outcome:
    """How a sequence ended, for the wire."""
    usage = Usage(sequence.prompt_tokens, sequence.output_tokens, sequence.cached_tokens or 0)
    return Outcome(ending.reason, usage, ending.stop, sequence.seed)


#: Of a prompt or an output, in the log.
_SHOWN_TOKENS: Final = 1024


class Intake:
    """Turns requests into sequences.

    Args:
        loaded: the model, for its tokenizer, vocabulary, EOS ids and defaults.
        context: longest prompt + output, in tokens: the model's context, or less if the cache is smaller.
    """

    def __init__(self, loaded: LoadedModel, context: int) -> None:
        self._tokenizer: Any = loaded.tokenizer
        self._vocab = loaded.vocab
        # Some configurations name ids that the model has no logit for.
        self._eos_ids = frozenset(id for id in loaded.eos_ids if 0 <= id < loaded.vocab)
        self._defaults = loaded.defaults
        self._context = context
        self._prompts = Prompts(loaded.tokenizer, loaded.config)
        self._grammars = Grammars(loaded.tokenizer, loaded.vocab, self._eos_ids)

    def accept(self, command: exchange.Run) -> Sequence | Answer:
        """Decode and check a request, with the chunks that its client already has.

        Raises:
            InvalidRequest: names the field at fault.
        """
        request = protocol.decode_request(command.request)
        if request.task != "generate":
            answer = self._convert(request)
            return answer if not command.chunks else Answer(None, answer.outcome)
        source = _source(request)
        prompt_ids = self._encode(request, source)
        sequence = self._sequence(command, request, prompt_ids, source)
        delivered = _delivered(command.chunks)
        if delivered is not None:
            ending = self._replay(sequence, delivered)
            if ending is not None:
                return Answer(_rest(sequence), outcome(sequence, ending))
        if not sequence.params.max_tokens and not sequence.wants_prompt_logits:
            return self._echo_only(sequence)
        return sequence

    def warm_up(self) -> None:
        """Compile a grammar: the first one costs a second with a large vocabulary."""
        self._grammars.compile(protocol.Grammar("regex", "a"))

    def opening(self, sequence: Sequence, chunk: Chunk) -> None:
        """Put what only the first chunk carries into `chunk`: the echo and the prompt's log-probabilities."""
        sequence.opened = True
        if sequence.params.echo:
            prompt_ids = sequence.token_ids[: sequence.prompt_tokens]
            chunk.prompt_token_ids = prompt_ids
            chunk.prompt_text = self._decode(prompt_ids, sequence.params.skip_special_tokens)
        chunk.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None

    def shown(self, sequence: Sequence) -> tuple[str, str]:
        """Prompt and output for the log, where it may hold them; only the beginning of long ones."""
        halves = sequence.token_ids[: sequence.prompt_tokens], sequence.output_ids
        prompt, output = (self._decode(half[:_SHOWN_TOKENS], skip_special_tokens=False) for half in halves)
        return prompt, output

    # ── tasks without a model ────────────────────────────────────────────────────────────────────

    def _convert(self, request: Request) -> Answer:
        if request.task == "tokenize":
            if request.token_ids is not None:
                raise InvalidRequest("token_ids: there is nothing to tokenize", param="token_ids")
            token_ids = self._encode(request, _source(request))
            chunk = Chunk(token_ids=token_ids)
        else:
            if request.token_ids is None or _given(request) != ["token_ids"]:
                raise InvalidRequest("token_ids: detokenize takes token_ids alone", param="token_ids")
            token_ids = request.token_ids
            self._check_ids(token_ids, "token_ids")
            chunk = Chunk(text=self._decode(token_ids, request.params.skip_special_tokens))
        return Answer(chunk, Outcome("stop", Usage(len(token_ids), 0)))

    def _echo_only(self, sequence: Sequence) -> Answer:
        chunk = Chunk()
        self.opening(sequence, chunk)
        return Answer(chunk, outcome(sequence, Ending("length")))

    # ── prompt ───────────────────────────────────────────────────────────────────────────────────

    def _encode(self, request: Request, source: str) -> list[int]:
        self._check_length(request, source)
        token_ids = self._prompts.encode(request)
        if not token_ids:
            raise InvalidRequest(f"{source}: the prompt is empty", param=source)
        self._check_ids(token_ids, source)
        return token_ids

    def _check_length(self, request: Request, source: str) -> None:
        """Refuse a giant text by its beginning, before the tokenizer spends seconds on all of it."""
        text = (request.prompt or "") + "".join(message.text for message in request.messages or ())
        enough = self._context * _CHARACTERS_PER_TOKEN
        if len(text) <= enough:
            return
        least = len(self._tokenizer.encode(text[:enough], add_special_tokens=False))
        if least > self._context:
            raise ContextTooLong(
                f"{source}: the prompt has more than {least} tokens, the context is {self._context}",
                param=source,
            )

    def _check_ids(self, token_ids: Items[int], field: str) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab):
            wrong = next(id for id in token_ids if not 0 <= id < self._vocab)
            raise InvalidRequest(f"{field}: {wrong} is no token; ids are 0 to {self._vocab - 1}", param=field)

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    # ── parameters ───────────────────────────────────────────────────────────────────────────────

    def _sequence(
        self, command: exchange.Run, request: Request, prompt_ids: list[int], source: str
    ) -> Sequence:
        max_tokens = self._max_tokens(request.params, len(prompt_ids), source)
        params = self._resolve(request.params, len(prompt_ids), max_tokens)
        grammar = request.params.grammar
        text = TextStream(
            self._tokenizer,
            list(params.stop),
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
            context=prompt_ids[-_TEXT_CONTEXT:],
        )
        return Sequence(
            id=command.id,
            request_id=command.request_id,
            token_ids=prompt_ids,
            prompt_tokens=len(prompt_ids),
            params=params,
            seed=_seed_of(command.request_id) if request.params.seed is None else request.params.seed,
            text=text,
            grammar=self._grammars.compile(grammar) if grammar is not None else None,
            traceparent=request.traceparent,
        )

    def _max_tokens(self, params: Params, prompt_tokens: int, source: str) -> int:
        """The output tokens that are asked for, or that there is room for.

        Raises:
            ContextTooLong: with the limit, the prompt's size and what was asked for.
        """
        room = self._context - prompt_tokens
        wanted = params.max_tokens
        least = 1 if wanted is None else wanted
        if least > room:
            asked = "at least one more" if wanted is None else f"{wanted} more (max_tokens)"
            raise ContextTooLong(
                f"The context is {self._context} tokens: the prompt has {prompt_tokens}, and {asked} would"
                f" make {prompt_tokens + least}.",
                param=source if room < 1 else "max_tokens",
            )
        return room if wanted is None else wanted

    def _resolve(self, params: Params, prompt_tokens: int, max_tokens: int) -> SamplingParams:
        self._check(params, max_tokens)
        _check_report(params, prompt_tokens)
        top_k = self._value(params.top_k, "top_k")
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            temperature=self._value(params.temperature, "temperature"),
            top_k=max(0, int(top_k)),
            top_p=self._value(params.top_p, "top_p"),
            min_p=self._value(params.min_p, "min_p"),
            repetition_penalty=self._value(params.repetition_penalty, "repetition_penalty"),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple(params.logit_bias),
            stop=tuple(params.stop),
            stop_token_ids=frozenset(params.stop_token_ids),
            eos_ids=self._eos_ids,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            echo=params.echo,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _value(self, given: T | None, name: str) -> T:
        return _default(self._defaults, name) if given is None else given

    def _check(self, params: Params, max_tokens: int) -> None:
        _check_finite(params)
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens: {params.min_tokens} is more than the {max_tokens} tokens that may be generated",
                param="min_tokens",
            )
        if not max_tokens and not params.echo and params.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens: 0 needs echo or prompt_logprobs, otherwise nothing is asked for",
                param="max_tokens",
            )
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids([token_id for token_id, _ in params.logit_bias], "logit_bias")

    # ── continuation ─────────────────────────────────────────────────────────────────────────────

    def _replay(self, sequence: Sequence, delivered: Chunk) -> Ending | None:
        """Bring a new sequence to where its client's chunks end.

        Raises:
            InvalidRequest: this model could not have generated these chunks.
        """
        self._check_ids(delivered.token_ids, "chunks")
        sequence.opened = True
        ending = Ending("length") if not sequence.params.max_tokens else None
        for token_id in delivered.token_ids:
            if ending is not None:
                raise InvalidRequest("chunks: they go on after the request's end", param="chunks")
            ending = sequence.accept(token_id)
        if not sequence.unsent.startswith(delivered.text):
            raise InvalidRequest("chunks: their text is not that of their tokens", param="chunks")
        sequence.unsent = sequence.unsent[len(delivered.text) :]
        return ending


def _given(request: Request) -> list[str]:
    return [name for name in _SOURCES if getattr(request, name) is not None]


def _source(request: Request) -> str:
    """Which of the three says what the prompt is."""
    given = _given(request)
    if len(given) != 1:
        what = "none of them" if not given else " and ".join(given)
        raise InvalidRequest(
            f"{given[-1] if given else 'prompt'}: exactly one of prompt, token_ids and messages is needed;"
            f" {what} was given",
            param=given[-1] if given else "prompt",
        )
    if not getattr(request, given[0]):
        raise InvalidRequest(f"{given[0]}: it is empty", param=given[0])
    if request.tools is not None and request.messages is None:
        raise InvalidRequest("tools: they need messages", param="tools")
    return given[0]


def _check_finite(params: Params) -> None:
    """A NaN passes every comparison with a bound, in whichever library."""
    for name in (*_NEUTRAL, "presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if value is not None and not math.isfinite(value):
            raise InvalidRequest(f"{name}: {value} is no number", param=name)
    for token_id, bias in params.logit_bias:
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias: {bias} for token {token_id} is no number", param="logit_bias")


def _check_report(params: Params, prompt_tokens: int) -> None:
    """Refuse a report that can't be sent before gigabytes of it are collected."""
    if params.prompt_logprobs is None:
        return
    least = prompt_tokens * (1 + params.prompt_logprobs) * _REPORT_BYTES
    if least > protocol.MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"prompt_logprobs: {params.prompt_logprobs} alternatives for each of {prompt_tokens} tokens make"
            f" more than {least} bytes, at most {protocol.MAX_FRAME_BYTES} can be sent",
            param="prompt_logprobs",
        )


def _default(defaults: SamplingDefaults, name: str) -> Any:
    value = getattr(defaults, name)
    return _NEUTRAL[name] if value is None else value


def _seed_of(request_id: str) -> int:
    """A seed for a request that came without: the same wherever the request goes on."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little", signed=True)


def _delivered(frames: Items[bytes]) -> Chunk | None:
    """What the client has, as one chunk."""
    if not frames:
        return None
    try:
        whole = protocol.merge([protocol.chunk_body.decode(frame) for frame in frames])
    except (msgspec.MsgspecError, RecursionError, ValueError) as problem:
        raise InvalidRequest(f"chunks: {problem}", param="chunks") from None
    if whole.start:
        raise InvalidRequest(f"chunks: the first begins at token {whole.start}", param="chunks")
    return whole


def _rest(sequence: Sequence) -> Chunk | None:
    text = sequence.take_unsent()
    return Chunk(start=sequence.output_tokens, text=text) if text else None
