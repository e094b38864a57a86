"""What the output must match: JSON schema, JSON, a regular expression or a Lark grammar, through llguidance.

Knows nothing of batches. Grammars that don't compile are the caller's error.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, Final

import llguidance
import llguidance.hf
import torch
from llguidance import LLMatcher
from torch import Tensor

from broker import protocol
from broker.errors import InternalError, InvalidRequest

MAX_GRAMMAR_BYTES: Final = 256 * 1024
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
            raise InternalError(f"The grammar can't go on: {self._matcher.get_error()}")
        return torch.frombuffer(bytearray(packed), dtype=torch.int32)

    def accept(self, token_id: int) -> None:
        """Go on by a token.

        Raises:
            InternalError: the grammar doesn't allow it, which the mask should have prevented.
        """
        if not self._matcher.consume_token(token_id):
            raise InternalError(f"The grammar doesn't allow token {token_id}: {self._matcher.get_error()}")


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
        if len(grammar.value.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"grammar: it may have {MAX_GRAMMAR_BYTES} bytes", param="grammar")
        if self._for_llguidance is None:
            eos = sorted(self._eos_ids) or None
            self._for_llguidance = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab, eos_token=eos
            )
        try:
            source = _source(grammar)
            problem = LLMatcher.validate_grammar(source, self._for_llguidance)
        except ValueError as wrong:
            problem = str(wrong)
        if problem and not problem.startswith("WARNING"):
            raise InvalidRequest(f"grammar: it doesn't compile: {_first_lines(problem)}", param="grammar")
        matcher = LLMatcher(self._for_llguidance, source)
        if matcher.is_error():
            raise InvalidRequest(
                f"grammar: it doesn't compile: {_first_lines(matcher.get_error())}", param="grammar"
            )
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


def _first_lines(problem: str) -> str:
    return " ".join(problem.split())[:500]
