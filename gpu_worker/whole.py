"""For models that the paged path refuses: a runner for one request at a time, over transformers' own cache.

Stands in the engine where `Runner` stands, so sampling, text, seeds and continuation are the same. A model's
cache is used only after it has said the same as a forward pass over the whole text; else each step
computes the whole text again, which is slow and right.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from broker.logs import Log

from .batch import RowLike
from .loading import LoadedModel
from .settings import WorkerSettings

TRIAL_TOKENS: Final = 8
#: What models call the argument, and the output, that carries their state; the first that a model has.
CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params", "state")


def settings_for_one(settings: WorkerSettings, context: int) -> WorkerSettings:
    """The settings under which the engine sends one whole request at a time to this runner."""
    import msgspec

    return msgspec.structs.replace(settings, slots=1, step_tokens=max(16, context), prefix_cache=False)


class WholeRunner:
    """One sequence at a time.

    Args:
        loaded: the model.
        log: says which cache is used.

    Attributes:
        pages_total: 1: the one sequence's.
        page_tokens: the context.
    """

    pages_total = 1

    def __init__(self, loaded: LoadedModel, log: Log) -> None:
        self.page_tokens = loaded.context
        self._model = loaded.model
        self._device = loaded.device
        self._vocab = loaded.vocab
        self._log = log
        self._accepted = set(inspect.signature(loaded.model.forward).parameters)
        self._cache_name = next((name for name in CACHE_NAMES if name in self._accepted), "")
        self._cache: Any = None
        self._cached_for: object = None
        self._cached_tokens = 0

    @torch.inference_mode()
    def forward(self, rows: Sequence[RowLike]) -> Tensor:
        """As `Runner.forward`; there is one row."""
        logits = self._run(rows)
        return logits[-1:] if _samples(rows[0]) else logits[:0]

    @torch.inference_mode()
    def forward_with_prompts(
        self, rows: Sequence[RowLike], every_token: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `Runner.forward_with_prompts`; there is one row."""
        logits = self._run(rows)
        sampling = logits[-1:] if _samples(rows[0]) else logits[:0]
        return sampling, dict.fromkeys(every_token, logits)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Send a few tokens through the model, and see whether its cache can be trusted."""
        ids = [i % self._vocab for i in range(1, TRIAL_TOKENS + 1)]
        if self._cache_name and not self._cache_agrees(ids):
            self._cache_name = ""
        self._log.info("one request at a time", cache=self._cache_name or "none: each step is computed anew")

    def _cache_agrees(self, ids: list[int]) -> bool:
        """Whether the last token says the same after the others' cache as in the whole text."""
        whole = self._all(ids)[-1]
        self._restart(None)
        self._step(ids[:-1])
        if self._cache is None:
            return False
        one = self._step(ids[-1:])[-1]
        self._restart(None)
        return torch.allclose(one, whole, rtol=0.05, atol=0.05 * float(whole.abs().max()))

    def start_compile(self) -> None:
        """Nothing is compiled on this path."""

    def _run(self, rows: Sequence[RowLike]) -> Tensor:
        """Logits at each of the row's tokens, float32 [tokens, vocab]."""
        assert len(rows) == 1, f"{len(rows)} rows for a runner of one"
        sequence, tokens = rows[0].sequence, rows[0].tokens
        end = sequence.computed + tokens
        if not self._cache_name:
            return self._all(sequence.token_ids[:end])[-tokens:]
        behind = self._cached_for is not sequence or self._cached_tokens != sequence.computed
        if behind or tokens > 1:
            # Many states take either a whole text or one token more: nothing in between.
            self._restart(sequence)
            return self._step(sequence.token_ids[:end])[-tokens:]
        return self._step(sequence.token_ids[sequence.computed : end])

    def _restart(self, sequence: object) -> None:
        self._cache, self._cached_for, self._cached_tokens = None, sequence, 0

    def _step(self, ids: list[int]) -> Tensor:
        given = {self._cache_name: self._cache} if self._cache is not None else {}
        out = self._model(self._tensor(ids), use_cache=True, **given)
        self._cache = getattr(out, self._cache_name, None)
        self._cached_tokens += len(ids)
        logits: Tensor = out.logits[0].float()
        return logits

    def _all(self, ids: list[int]) -> Tensor:
        flags = {"use_cache": False} if "use_cache" in self._accepted else {}
        logits: Tensor = self._model(self._tensor(ids), **flags).logits[0].float()
        return logits

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], dtype=torch.long, device=self._device)


def _samples(row: RowLike) -> bool:
    return row.sequence.computed + row.tokens == len(row.sequence.token_ids)
