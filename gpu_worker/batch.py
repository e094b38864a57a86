"""Rows of a step → the tensors of one forward pass. Knows nothing of the model or of why these rows.

All tokens of all rows lie one behind the other in one sequence of batch size 1: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class SequenceLike(Protocol):
    """What a batch reads of a sequence."""

    token_ids: list[int]
    computed: int
    pages: list[int]


class RowLike(Protocol):
    """Compute `tokens` tokens of `sequence`, from `computed` on."""

    @property
    def sequence(self) -> SequenceLike: ...  # noqa: D102
    @property
    def tokens(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input on the model's device. T tokens of R rows, S of which sample."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: page * page_tokens + offset
    query_start: Tensor  # int32 [R + 1]
    context: Tensor  # int32 [R]: tokens of the row in the cache after this step
    page_table: Tensor  # int32 [R, pages]; unused entries are 0
    wanted: Tensor  # int64 [S]: tokens whose logits are wanted, as indices into T; never empty
    wanted_count: int  # S, or 0 where `wanted` only stands in
    query_lens: list[int]
    context_lens: list[int]

    @property
    def decodes(self) -> bool:
        """Whether each row has one token, and wants its logits."""
        return self.wanted_count == len(self.query_lens) == self.token_ids.shape[0]


def build(
    rows: Sequence[RowLike],
    *,
    page_tokens: int,
    device: torch.device,
    every_token: Collection[int] = (),
) -> Batch:
    """Flatten the rows of a step.

    Args:
        rows: what to compute; every sequence has pages for its new tokens.
        page_tokens: tokens in one page.
        device: where the tensors are to live.
        every_token: numbers of rows whose logits are wanted at every token, not only at the last.
    """
    query_lens = [row.tokens for row in rows]
    context_lens = [row.sequence.computed + row.tokens for row in rows]
    total = sum(query_lens)
    token_ids = np.empty(total, np.int64)
    positions = np.empty(total, np.int64)
    slots = np.empty(total, np.int64)
    width = max(-(-length // page_tokens) for length in context_lens)
    table = np.zeros((len(rows), width), np.int32)
    wanted: list[int] = []
    start = 0
    for number, row in enumerate(rows):
        sequence, first, end = row.sequence, row.sequence.computed, context_lens[number]
        used = -(-end // page_tokens)
        assert len(sequence.pages) >= used, f"{end} tokens need {used} pages, there are {len(sequence.pages)}"
        table[number, :used] = sequence.pages[:used]
        stop = start + row.tokens
        if row.tokens == 1:
            token_ids[start] = sequence.token_ids[first]
            positions[start] = first
        else:
            token_ids[start:stop] = sequence.token_ids[first:end]
            positions[start:stop] = np.arange(first, end)
        at = positions[start:stop]
        slots[start:stop] = table[number, at // page_tokens].astype(np.int64) * page_tokens + at % page_tokens
        if number in every_token:
            wanted.extend(range(start, stop))
        elif end == len(sequence.token_ids):
            wanted.append(stop - 1)
        start = stop
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(query_lens, out=query_start[1:])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        query_start=tensor(query_start),
        context=tensor(np.array(context_lens, np.int32)),
        page_table=tensor(table),
        wanted=tensor(np.array(wanted or [0], np.int64)),
        wanted_count=len(wanted),
        query_lens=query_lens,
        context_lens=context_lens,
    )
