"""What the output must match: JSON schema, JSON, a regular expression or a Lark grammar, through llguidance.

Knows nothing of batches. Grammars that don't compile, or not within the limits, are the caller's error. A
mask takes a hundredth of a millisecond as a rule, so it is made when the sampler asks for it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import llguidance
import llguidance.hf
import torch
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor

from broker import protocol
from broker.errors import InternalError, InvalidRequest

MAX_BYTES: Final = {
    "json_schema": 64 * 1024,
    "json_object": 64 * 1024,
    "regex": 16 * 1024,
    "lark": 32 * 1024,
}
#: Lines of a Lark grammar: compiling takes a time that may grow with the cube of the number of rules.
MAX_RULES: Final = 1000
#: The compiler descends rule by rule; long grammars would overrun a thread's usual stack.
STACK_BYTES: Final = 64 * 1024 * 1024
#: Work on a grammar's regular expressions before its first token, in llguidance's units: some 10 ms.
LEXER_FUEL: Final = 400_000
COMPILED_KEPT: Final = 64  # grammars
ANY_OBJECT: Final = '{"type": "object"}'


class GrammarState:
    """Where one output is in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Whether the grammar is complete and nothing more may come."""
        stopped: bool = self._matcher.is_stopped()
        return stopped

    def mask(self) -> Tensor:
        """The tokens that may come next: int32 [vocab / 32, rounded up], one bit each, lowest first.

        Raises:
            InternalError: the grammar grew past its limits while it was matched.
        """
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise InternalError(f"The grammar can't go on: {_reason(self._matcher)}")
        return torch.frombuffer(bytearray(packed), dtype=torch.int32)

    def accept(self, token_id: int) -> None:
        """Go on by a token.

        Raises:
            InternalError: the grammar doesn't allow it, which the mask should have prevented.
        """
        if not self._matcher.consume_token(token_id):
            raise InternalError(f"The grammar doesn't allow token {token_id}. {_reason(self._matcher)}")


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab: token ids are below this.
        eos_ids: tokens that may end an output that is complete.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos_ids = eos_ids
        self._for_llguidance: Any = None  # made on first use: it costs a second with a large vocabulary
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def compile(self, grammar: protocol.Grammar) -> GrammarState:
        """A fresh state at the grammar's beginning.

        Raises:
            InvalidRequest: the grammar doesn't compile; with the reason.
        """
        key = (grammar.kind, grammar.value)
        matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._compiled[key] = self._matcher(grammar)
            while len(self._compiled) > COMPILED_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return GrammarState(matcher.deep_copy())

    def _matcher(self, grammar: protocol.Grammar) -> Any:
        most = MAX_BYTES[grammar.kind]
        if len(grammar.value.encode(errors="replace")) > most:
            raise InvalidRequest(f"grammar: a {grammar.kind} may have {most} bytes", param="grammar")
        if grammar.kind == "lark" and grammar.value.count("\n") > MAX_RULES:
            raise InvalidRequest(f"grammar: it may have {MAX_RULES} lines", param="grammar")
        if self._for_llguidance is None:
            eos = sorted(self._eos_ids) or None
            self._for_llguidance = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab, eos_token=eos
            )
        try:
            matcher = _with_deep_stack(lambda: self._compile(_source(grammar)))
        except (ValueError, RecursionError) as wrong:
            raise InvalidRequest(f"grammar: it doesn't compile: {wrong}", param="grammar") from None
        if matcher.is_error():
            raise InvalidRequest(f"grammar: it doesn't compile: {_reason(matcher)}", param="grammar")
        return matcher

    def _compile(self, source: str) -> Any:
        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._for_llguidance, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what would blow up at the first token does it here
        return matcher


def _source(grammar: protocol.Grammar) -> str:
    """The grammar in llguidance's own form."""
    match grammar.kind:
        case "json_object":
            source = LLMatcher.grammar_from_json_schema(ANY_OBJECT)
        case "json_schema":
            json.loads(grammar.value)  # a clear error before llguidance's
            source = LLMatcher.grammar_from_json_schema(grammar.value)
        case "regex":
            source = LLMatcher.grammar_from_regex(grammar.value)
        case "lark":
            source = LLMatcher.grammar_from_lark(grammar.value)
    text: str = source
    return text


def _reason(matcher: Any) -> str:
    """The matcher's error in one line."""
    return " ".join(str(matcher.get_error()).replace("<non-verbose/>", "").split())[:500]


def _with_deep_stack(work: Callable[[], Any]) -> Any:
    """The result of `work`, done in a thread with `STACK_BYTES` of stack."""
    usual = threading.stack_size(STACK_BYTES)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="grammar") as deep:
            return deep.submit(work).result()
    finally:
        threading.stack_size(usual)
