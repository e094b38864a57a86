"""One request being generated: its tokens, what is in the cache of them, and what is still to be said.

Knows nothing of the model, the batch or the wire. Written by the engine and the scheduler, read by the
runner and the sampler.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from broker.protocol import TokenLogprob

if TYPE_CHECKING:
    from .adjustments import Adjustments
    from .grammar import GrammarState
    from .text import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw a request's tokens and when to end, with all defaults filled in.

    Attributes:
        max_tokens: most output tokens; prompt and these fit the context.
        min_tokens: until there are so many output tokens, `ending_ids` are not to be drawn.
        temperature: 0 is greedy.
        top_k: 0 is no limit.
        logit_bias: token id and what is added to its logit.
        ending_ids: tokens that end the request: `stop_token_ids`, and `eos_ids` unless `ignore_eos`.
        logprobs: alternatives to report with each output token; None is no report at all.
        prompt_logprobs: the same for the prompt's tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    ending_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        ending = self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_ids
        object.__setattr__(self, "ending_ids", ending)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended; `stop` is the stop string or the stop token that did it, None for EOS."""

    reason: Literal["stop", "length"]
    stop: str | int | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way through the engine.

    Who writes what: `computed`, `pages`, `page_keys`, `number` and `cached_tokens` are the scheduler's,
    the rest is the engine's. Two sequences are equal only if they are the same one.

    Attributes:
        id: the broker's name for this attempt.
        request_id: the client's name, for the log.
        token_ids: the prompt's tokens, then the output's; only the engine appends.
        prompt_tokens: how many of them are the prompt's, at least 1.
        params: how to go on.
        seed: with a token's position it fixes the draw.
        text: turns output tokens into text that may leave.
        grammar: what the output must match, or None.
        adjustments: what the parameters change in its logits; the sampler's own.
        computed: tokens whose keys and values are in the cache.
        pages: page numbers; position p is in ``pages[p // page_tokens]``.
        page_keys: names of the full pages by content, as far as they have been worked out.
        number: order of arrival; the scheduler never serves a younger one before an older.
        cached_tokens: of the prompt, found in the prefix cache when the request first ran.
        unsent: text that may leave and is in no chunk yet.
        prompt_logprobs: collected while the prompt is computed, None first; None when not wanted or sent.
        opened: the first chunk, which carries echo and prompt log-probabilities, is out.
        traceparent: W3C trace context, for the log.
        arrived: when this worker got it, monotonic seconds.
    """

    id: str
    request_id: str
    token_ids: list[int]
    prompt_tokens: int
    params: SamplingParams
    seed: int
    text: TextStream
    grammar: GrammarState | None = None
    adjustments: Adjustments | None = None
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    number: int = 0
    cached_tokens: int | None = None
    unsent: str = ""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    opened: bool = False
    traceparent: str = ""
    arrived: float = field(default_factory=time.monotonic)

    @property
    def position(self) -> int:
        """Index of the token to be drawn next; the first one after a prompt of P tokens has P."""
        return len(self.token_ids)

    @property
    def output_tokens(self) -> int:
        """How many tokens were generated, here or by workers before."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.prompt_tokens :]

    @property
    def remaining_tokens(self) -> int:
        """How many tokens may still be generated."""
        return self.params.max_tokens - self.output_tokens

    @property
    def uncomputed(self) -> int:
        """Tokens that the model has yet to see; 1 while decoding, never less."""
        return len(self.token_ids) - self.computed

    @property
    def most_tokens(self) -> int:
        """The longest that it can become, prompt and output together."""
        return self.prompt_tokens + self.params.max_tokens

    @property
    def wants_prompt_logits(self) -> bool:
        """Logits at each prompt token are needed, so nothing of the prompt may come from the prefix cache."""
        return self.params.prompt_logprobs is not None and not self.opened

    def accept(self, token_id: int) -> Ending | None:
        """Append a drawn token; its text goes to `unsent`. Says how the request ends, if it does.

        The text of a token that ends the request is not output.
        """
        self.token_ids.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)
        if token_id in self.params.ending_ids:
            self.unsent += self.text.finish()
            return Ending("stop", token_id if token_id in self.params.stop_token_ids else None)
        self.unsent += self.text.push(token_id)
        if self.text.stop_hit is not None:
            return Ending("stop", self.text.stop_hit)
        if self.grammar is not None and self.grammar.finished:
            self.unsent += self.text.finish()
            return Ending("stop")
        if self.remaining_tokens <= 0:
            self.unsent += self.text.finish()
            return Ending("length")
        return None

    def take_unsent(self) -> str:
        """The text that may leave, for the next chunk."""
        text, self.unsent = self.unsent, ""
        return text
