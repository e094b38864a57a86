"""One batched pass that draws a token for every row, each with its own parameters.

A row's token depends on its own logits, parameters, seed and position, never on its neighbours. Order of
the steps: penalties, bias, bans (`adjustments`), temperature, then the limits top_k, top_p (of what top_k
leaves) and min_p as thresholds on the tokens' weights (ties with the last one that gets in get in too), then
one draw by the inverse of the cumulative distribution over the vocabulary's order.

Log-probabilities are those of the model's own distribution, before all of this.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from broker.protocol import MAX_TOP_LOGPROBS

from . import batched, by_row
from .adjustments import NEVER, adjust
from .draws import uniforms

if TYPE_CHECKING:
    from .sequence import Sequence

GREEDY_BELOW: Final = 1e-5  # a lower temperature is greedy: dividing by it would overflow
INFINITE: Final = float("inf")


@dataclass(slots=True)
class Sampled:
    """What was drawn for one row.

    Attributes:
        token_id: the token.
        logprob: its log-probability in the model's own distribution, if it was asked for.
        top: the likeliest tokens with theirs, most likely first.
        error: why there is no token; the others are meaningless then.
    """

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    error: str | None = None


class Sampler:
    """Draws tokens.

    Args:
        device: where the logits are.
        vocab: token ids are below this; a row may be padded beyond it.
    """

    def __init__(self, device: torch.device, vocab: int) -> None:
        self._device = device
        self._vocab = vocab

    def sample(self, logits: Tensor, sequences: Items[Sequence]) -> list[Sampled]:
        """Draw one token per row.

        Args:
            logits: float32 [rows, ≥ vocab], changed in place where a row's parameters say so.
            sequences: the rows' requests, in order.
        """
        logits = logits[:, : self._vocab]
        reported = [row for row, s in enumerate(sequences) if s.params.logprobs is not None]
        raw = logits[reported] if reported else None  # a copy
        failed = adjust(logits, sequences)
        tokens, peaks = _likeliest(logits)
        for row, peak in enumerate(peaks):
            if row not in failed and not -INFINITE < peak < INFINITE:
                failed[row] = _why(peak)
        drawn = [row for row, s in enumerate(sequences) if s.params.temperature >= GREEDY_BELOW]
        drawn = [row for row in drawn if row not in failed]
        if drawn:
            part = logits if len(drawn) == len(sequences) else logits[drawn]
            found = self._draw(part, [sequences[row] for row in drawn], [peaks[row] for row in drawn])
            for row, token in zip(drawn, found, strict=True):
                tokens[row] = token
        results = [Sampled(token) for token in tokens]
        if raw is not None:
            _report(raw, [results[row] for row in reported], [sequences[row] for row in reported])
        for row, reason in failed.items():
            results[row] = Sampled(0, error=reason)
        return results

    def _draw(self, logits: Tensor, sequences: Items[Sequence], peaks: list[float]) -> list[int]:
        """One draw per row of float32 [rows, vocab], all of which have a finite peak."""
        numbers = uniforms([s.seed for s in sequences], [s.position for s in sequences])
        draw = by_row.draw if self._device.type == "cpu" else batched.draw
        return draw(logits, [s.params for s in sequences], peaks, numbers)


def _likeliest(logits: Tensor) -> tuple[list[int], list[float]]:
    """Each row's likeliest token, and its logit; NaN where the row has one."""
    if logits.device.type == "cpu":  # numpy's is an order of magnitude faster than torch's here
        token_ids = torch.from_numpy(logits.numpy().argmax(-1))
        best = logits.gather(1, token_ids[:, None])[:, 0]
    else:
        best, token_ids = logits.max(-1)
    return token_ids.tolist(), best.tolist()


def _why(peak: float) -> str:
    if peak == NEVER:
        return "No token is allowed here: grammar, bias and min_tokens leave nothing."
    return "The model's output is not a number."


def _report(raw: Tensor, results: list[Sampled], sequences: list[Sequence]) -> None:
    """Fill in log-probabilities from float32 [results, vocab], the model's own logits."""
    norms = raw.logsumexp(-1, keepdim=True)
    token_ids = torch.tensor([result.token_id for result in results], device=raw.device)
    chosen = (raw.gather(1, token_ids[:, None]) - norms)[:, 0].tolist()
    for result, logprob in zip(results, chosen, strict=True):
        result.logprob = logprob
    if any(s.params.logprobs for s in sequences):
        # Always as many, so that the order of equals doesn't depend on what others ask for.
        best = raw.topk(min(MAX_TOP_LOGPROBS, raw.shape[1]))
        values, ids = (best.values - norms).tolist(), best.indices.tolist()
        for result, sequence, its_ids, its_values in zip(results, sequences, ids, values, strict=True):
            wanted = sequence.params.logprobs or 0
            result.top = list(zip(its_ids[:wanted], its_values[:wanted], strict=True))
