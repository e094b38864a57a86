"""What a request's parameters do to its logits before a token is drawn: penalties, bias, bans, grammar.

All rows are changed in one pass, at the few places that their parameters name. What doesn't change from
token to token is prepared once per request, and tokens are counted as they come. Knows nothing of draws.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from broker.errors import LoadOnceError

if TYPE_CHECKING:
    from .sequence import SamplingParams, Sequence

NEVER: Final = float("-inf")
_FIRST_ROOM: Final = 256  # distinct tokens


class Adjustments:
    """What one request changes in its rows; kept with it from token to token.

    Attributes:
        changes: it changes anything, apart from its grammar's bans.
        bias_ids, bias: int64 and float32 [tokens], no token twice.
        ending_ids: int64 [tokens], not to be drawn before `min_tokens`.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.penalised = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        self._of_prompt = params.repetition_penalty != 1.0  # the other two count the output alone
        summed: dict[int, float] = {}
        for token_id, bias in params.logit_bias:
            summed[token_id] = summed.get(token_id, 0.0) + bias
        self.bias_ids = np.array(list(summed), dtype=np.int64)
        self.bias = np.array(list(summed.values()), dtype=np.float32)
        self.ending_ids = np.array(sorted(params.ending_ids) if params.min_tokens else [], dtype=np.int64)
        self.changes = bool(self.penalised or summed or len(self.ending_ids))
        self._places: dict[int, int] = {}  # token → where it is counted
        self._ids = np.zeros(_FIRST_ROOM, dtype=np.int64)
        self._times = np.zeros(_FIRST_ROOM, dtype=np.float32)
        self._counted = 0

    def count(self, sequence: Sequence) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The request's distinct tokens so far, and how often each is in the output; prompt ones: 0 times."""
        token_ids, output = sequence.token_ids, sequence.prompt_tokens
        first = self._counted if self._of_prompt else max(self._counted, output)
        for position in range(first, len(token_ids)):
            self._count(token_ids[position], int(position >= output))
        self._counted = len(token_ids)
        used = len(self._places)
        return self._ids[:used], self._times[:used]

    def _count(self, token_id: int, times: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
        self._ids[place] = token_id
        self._times[place] += times


def adjust(logits: Tensor, sequences: Items[Sequence]) -> dict[int, str]:
    """Change the rows as their parameters say, in place.

    Args:
        logits: float32 [rows, vocab].
        sequences: the rows' requests, in order.

    Returns:
        rows whose grammar can't go on, and why.
    """
    kept = [_of(sequence) for sequence in sequences]
    concerned = [
        (row, s, its) for row, (s, its) in enumerate(zip(sequences, kept, strict=True)) if its.changes
    ]
    if concerned:
        _penalise(logits, [(row, s, its) for row, s, its in concerned if its.penalised])
        biased = [(row, its) for row, _, its in concerned if len(its.bias_ids)]
        if biased:
            places = _places(logits, [(row, its.bias_ids) for row, its in biased])
            bias = _tensor(np.concatenate([its.bias for _, its in biased]), logits)
            logits[places] = logits[places] + bias
        young = [(row, its.ending_ids) for row, s, its in concerned if s.output_tokens < s.params.min_tokens]
        if young:
            logits[_places(logits, young)] = NEVER
    return _mask(logits, sequences)


def _of(sequence: Sequence) -> Adjustments:
    if sequence.adjustments is None:
        sequence.adjustments = Adjustments(sequence.params)
    return sequence.adjustments


def _penalise(logits: Tensor, rows: list[tuple[int, Sequence, Adjustments]]) -> None:
    """Divide positive logits, multiply negative ones (Keskar et al., *CTRL*, 2019); then subtract."""
    if not rows:
        return
    counted = [its.count(sequence) for _, sequence, its in rows]
    sizes = [len(ids) for ids, _ in counted]
    times = np.concatenate([times for _, times in counted])

    def spread(values: list[float]) -> NDArray[np.float32]:
        return np.repeat(np.array(values, dtype=np.float32), sizes)

    presence = spread([s.params.presence_penalty for _, s, _ in rows])
    frequency = spread([s.params.frequency_penalty for _, s, _ in rows])
    factor = _tensor(spread([s.params.repetition_penalty for _, s, _ in rows]), logits)
    less = _tensor(presence * (times > 0) + frequency * times, logits)
    places = _places(logits, [(row, ids) for (row, _, _), (ids, _) in zip(rows, counted, strict=True)])
    seen = logits[places]
    logits[places] = torch.where(seen > 0, seen / factor, seen * factor) - less


def _places(logits: Tensor, ids: list[tuple[int, NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
    """Row and column of each of these tokens in their rows; none may be there twice."""
    rows = np.repeat(np.array([row for row, _ in ids], dtype=np.int64), [len(its) for _, its in ids])
    columns = np.concatenate([its for _, its in ids])
    return _tensor(rows, logits), _tensor(columns, logits)


def _tensor(values: NDArray[np.int64] | NDArray[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def _mask(logits: Tensor, sequences: Items[Sequence]) -> dict[int, str]:
    """Ban the tokens that the rows' grammars don't allow now."""
    failed: dict[int, str] = {}
    rows, masks = [], []
    for row, sequence in enumerate(sequences):
        if sequence.grammar is None:
            continue
        try:
            masks.append(sequence.grammar.mask())
            rows.append(row)
        except LoadOnceError as problem:
            failed[row] = problem.message
    if rows:
        packed = torch.stack(masks).to(logits.device)  # int32 [grammars, vocab / 32, rounded up]
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = ((packed[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
        for number, row in enumerate(rows):
            logits[row].masked_fill_(allowed[number] == 0, NEVER)
    return failed
