"""One batched pass that draws a token for every row, each with its own parameters.

A row's token depends on its own logits, parameters, seed and position, never on its neighbours. Order of
the steps: penalties, bias, bans (min_tokens, grammar), temperature, then the limits top_k, top_p, min_p as
thresholds on the logits (ties with the last one that gets in get in too), then one draw by the inverse of
the cumulative distribution over the vocabulary's order.

Log-probabilities are those of the model's own distribution, before all of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from .draws import uniforms

if TYPE_CHECKING:
    from .sequence import Sequence

GREEDY_BELOW: Final = 1e-5  # a lower temperature is greedy: dividing by it would overflow
FIRST_CANDIDATES: Final = 256  # looked at for top_p before the whole row is sorted
BLOCK: Final = 256  # tokens summed at once in a draw
NEVER: Final = float("-inf")


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
        self._bits = torch.arange(32, dtype=torch.int32, device=device)

    def sample(self, logits: Tensor, sequences: Items[Sequence]) -> list[Sampled]:
        """Draw one token per row.

        Args:
            logits: float32 [rows, ≥ vocab], changed in place where a row's parameters say so.
            sequences: the rows' requests, in order.
        """
        logits = logits[:, : self._vocab]
        reports = self._reports(logits, sequences)
        for row, sequence in enumerate(sequences):
            self._adjust(logits[row], sequence)
        best, token_ids = logits.max(-1)
        peaks, tokens = best.tolist(), token_ids.tolist()
        drawn = [row for row, s in enumerate(sequences) if s.params.temperature >= GREEDY_BELOW]
        drawn = [row for row in drawn if abs(peaks[row]) < float("inf")]
        if drawn:
            rows = logits if len(drawn) == len(sequences) else logits[drawn]
            for row, token in zip(drawn, self._draw(rows, [sequences[r] for r in drawn]), strict=True):
                tokens[row] = token
        return [
            _sampled(token, peak, report, self._vocab)
            for token, peak, report in zip(tokens, peaks, reports, strict=True)
        ]

    # ── what is reported ─────────────────────────────────────────────────────────────────────────

    def _reports(self, logits: Tensor, sequences: Items[Sequence]) -> list[_Report | None]:
        reports: list[_Report | None] = [None] * len(sequences)
        for row, sequence in enumerate(sequences):
            wanted = sequence.params.logprobs
            if wanted is not None:
                reports[row] = _Report(logits[row].log_softmax(-1), min(wanted, self._vocab))
        return reports

    # ── adjustments ──────────────────────────────────────────────────────────────────────────────

    def _adjust(self, row: Tensor, sequence: Sequence) -> None:
        params = sequence.params
        if params.repetition_penalty != 1.0:
            _penalise_repetition(row, self._ids(set(sequence.token_ids)), params.repetition_penalty)
        if (params.presence_penalty or params.frequency_penalty) and sequence.output_tokens:
            counts = Counter(sequence.output_ids)
            ids = self._ids(counts)
            times = torch.tensor(list(counts.values()), dtype=torch.float32, device=self._device)
            row[ids] -= params.presence_penalty + params.frequency_penalty * times
        if params.logit_bias:
            ids = self._ids([token for token, _ in params.logit_bias])
            bias = torch.tensor([b for _, b in params.logit_bias], dtype=torch.float32, device=self._device)
            row.index_add_(0, ids, bias)
        if sequence.output_tokens < params.min_tokens and params.ending_ids:
            row[self._ids(params.ending_ids)] = NEVER
        if sequence.grammar is not None:
            self._mask(row, sequence.grammar.mask())

    def _mask(self, row: Tensor, packed: Tensor) -> None:
        """Ban the tokens whose bit isn't set; `packed` is int32 [vocab / 32, rounded up]."""
        allowed = (packed.to(self._device)[:, None] >> self._bits) & 1
        row.masked_fill_(allowed.view(-1)[: row.shape[0]] == 0, NEVER)

    def _ids(self, ids: Items[int] | set[int] | frozenset[int] | Counter[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.long, device=self._device)

    # ── draws ────────────────────────────────────────────────────────────────────────────────────

    def _draw(self, logits: Tensor, sequences: Items[Sequence]) -> list[int]:
        """One draw per row of float32 [rows, vocab]; no row is all bans."""
        temperatures = torch.tensor([s.params.temperature for s in sequences], device=self._device)
        scaled = logits / temperatures[:, None]
        scaled -= scaled.amax(-1, keepdim=True)  # the likeliest token is at 0
        weights = scaled.exp()
        self._limit(scaled, weights, sequences)
        draws = uniforms([s.seed for s in sequences], [s.position for s in sequences])
        return _inverse(weights, torch.from_numpy(draws).to(self._device))

    def _limit(self, scaled: Tensor, weights: Tensor, sequences: Items[Sequence]) -> None:
        """Set the weight of tokens outside top_k, top_p and min_p to zero, row by row."""
        for row, sequence in enumerate(sequences):
            params = sequence.params
            floor = NEVER
            if params.min_p > 0:
                floor = float(torch.log(torch.tensor(params.min_p)))
            k = params.top_k if 0 < params.top_k < self._vocab else 0
            if k or params.top_p < 1:
                floor = max(floor, _floor(scaled[row], weights[row], k, params.top_p))
            if floor > NEVER:
                weights[row].masked_fill_(scaled[row] < floor, 0.0)


@dataclass(slots=True)
class _Report:
    logprobs: Tensor  # [vocab]
    rivals: int

    def of(self, token: int) -> tuple[float, list[tuple[int, float]]]:
        if not self.rivals:
            return float(self.logprobs[token]), []
        best = self.logprobs.topk(self.rivals)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return float(self.logprobs[token]), list(pairs)


def _sampled(token: int, peak: float, report: _Report | None, vocab: int) -> Sampled:
    if peak == NEVER:
        return Sampled(0, error="No token is allowed here: grammar, bias and min_tokens leave nothing.")
    if peak != peak or peak == float("inf"):
        return Sampled(0, error="The model's output is not a number.")
    if report is None:
        return Sampled(token)
    return Sampled(token, *report.of(token))


def _penalise_repetition(row: Tensor, ids: Tensor, penalty: float) -> None:
    """Divide positive logits, multiply negative ones (Keskar et al., *CTRL*, 2019)."""
    seen = row[ids]
    row[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _floor(scaled: Tensor, weights: Tensor, k: int, p: float) -> float:
    """The least logit that top_k and top_p (of what top_k leaves) let in. Both rows are [vocab]."""
    count = min(k or FIRST_CANDIDATES, scaled.shape[0])
    values = scaled.topk(count).values
    floor = float(values[-1]) if k else NEVER
    if p >= 1:
        return floor
    candidates = values.double().exp()
    total = candidates.sum() if k else weights.sum(dtype=torch.float64)
    sums = candidates.cumsum(0)
    if not k and float(sums[-1]) < p * float(total):
        values = scaled.sort(descending=True).values
        sums = values.double().exp().cumsum(0)
    last = int(torch.searchsorted(sums, p * total))
    return max(floor, float(values[min(last, len(values) - 1)]))


def _inverse(weights: Tensor, draws: Tensor) -> list[int]:
    """Tokens at which the cumulative weights pass the draws.

    Args:
        weights: float32 [rows, vocab], not all zero in any row.
        draws: float64 [rows] in [0, 1).
    """
    rows, vocab = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocab % BLOCK)).view(rows, -1, BLOCK)
    block_sums = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    targets = draws * block_sums[:, -1]
    blocks = torch.searchsorted(block_sums, targets[:, None], right=True)[:, 0]
    blocks.clamp_(max=block_sums.shape[1] - 1)
    before = torch.where(blocks > 0, block_sums.gather(1, (blocks - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    within = padded[torch.arange(rows, device=weights.device), blocks].double()
    sums = within.cumsum(-1)
    at = torch.searchsorted(sums, (targets - before)[:, None], right=True)[:, 0].clamp_(max=BLOCK - 1)
    chosen = blocks * BLOCK + at
    # Rounding may lead past the last weight of a block: then its heaviest token is taken.
    hit = within.gather(1, at[:, None])[:, 0] > 0
    heaviest = blocks * BLOCK + within.argmax(-1)
    return torch.where(hit, chosen, heaviest).tolist()
