"""Draws on a device: all rows at once in torch. On a CPU `by_row` does the same faster.

Limits are usually found among a row's heaviest thousand tokens; only rows for which these are too few are
looked at more widely, up to the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from .sequence import SamplingParams

BLOCK: Final = 256  # tokens summed at once
WIDTHS: Final = (1024, 8192)  # heaviest tokens looked at, before the whole row is
_TOO_FEW: Final = -1.0  # in place of a floor


def draw(
    logits: Tensor, params: Items[SamplingParams], peaks: Items[float], draws: NDArray[np.float64]
) -> list[int]:
    """One token per row.

    Args:
        logits: float32 [rows, vocab].
        params: of the rows, in order.
        peaks: each row's largest logit, finite.
        draws: [rows] in [0, 1).
    """

    def column(values: Items[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    weights = logits - column(peaks)
    weights.div_(column([p.temperature for p in params])).exp_()  # the likeliest token's is 1
    limit(weights, params)
    return _passed(weights, torch.from_numpy(draws).to(logits.device))


def limit(weights: Tensor, params: Items[SamplingParams]) -> None:
    """Set the weights of tokens outside top_k, top_p (of what top_k leaves) and min_p to zero.

    Ties with the last token that gets in get in too, so that no order decides.

    Args:
        weights: float32 [rows, vocab], in proportion to the probabilities; a row's largest is 1.
        params: of the rows, in order.
    """
    vocab = weights.shape[1]
    floors = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=weights.device)
    limits = [(p.top_k if 0 < p.top_k < vocab else 0, p.top_p) for p in params]
    open_rows = [row for row, (k, p) in enumerate(limits) if k or p < 1]
    if not open_rows and not any(p.min_p > 0 for p in params):
        return
    for width in (*WIDTHS, vocab):
        now = [row for row in open_rows if limits[row][0] <= width <= vocab]
        if not now:
            continue
        part = weights[now] if len(now) < len(params) else weights
        found = _floors(part, [limits[row] for row in now], width)
        floors[now] = torch.maximum(floors[now], found)
        done = {row for row, floor in zip(now, found.tolist(), strict=True) if floor != _TOO_FEW}
        open_rows = [row for row in open_rows if row not in done]
    weights.masked_fill_(weights < floors[:, None], 0.0)


def _floors(weights: Tensor, limits: list[tuple[int, float]], width: int) -> Tensor:
    """The least weights that (top_k, top_p) let in, float32 [rows]; a top_k of 0 is no limit.

    Where top_p needs more than the `width` heaviest tokens it is `_TOO_FEW`.
    """
    device = weights.device
    heaviest = weights.topk(width).values  # largest first
    k = torch.tensor([k for k, _ in limits], device=device)
    p = torch.tensor([p for _, p in limits], dtype=torch.float64, device=device)
    outside = (torch.arange(width, device=device) >= k[:, None]) & (k > 0)[:, None]
    sums = heaviest.double().masked_fill_(outside, 0.0).cumsum(-1)
    exact = (k > 0) | (width == weights.shape[1])
    total = torch.where(exact, sums[:, -1], weights.sum(-1).double())
    last = torch.searchsorted(sums, (p * total)[:, None])[:, 0]
    last = torch.where(p >= 1, k - 1, last)
    floors = heaviest.gather(1, last.clamp(0, width - 1)[:, None])[:, 0]
    return torch.where((last < width) | exact, floors, _TOO_FEW)


def _passed(weights: Tensor, draws: Tensor) -> list[int]:
    """Tokens at which the cumulative weights pass the draws.

    Args:
        weights: float32 [rows, vocab], not all zero in any row.
        draws: float64 [rows] in [0, 1).
    """
    rows, vocab = weights.shape
    if vocab % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocab % BLOCK))
    blocked = weights.view(rows, -1, BLOCK)
    sums = blocked.sum(-1).double().cumsum(-1)
    total = sums[:, -1]
    # Below the total even after rounding: a block that is passed then holds some weight.
    targets = torch.minimum(draws * total, torch.nextafter(total, total.new_zeros(())))[:, None]
    blocks = torch.searchsorted(sums, targets, right=True)
    before = torch.where(blocks > 0, sums.gather(1, (blocks - 1).clamp(min=0)), 0.0)
    within = blocked[torch.arange(rows, device=weights.device), blocks[:, 0]].double()
    at = torch.searchsorted(within.cumsum(-1), targets - before, right=True)
    # Rounding may lead past a block's last weight: then its heaviest token is taken.
    missed = (at == BLOCK) | (within.gather(1, at.clamp(max=BLOCK - 1)) == 0)
    at = torch.where(missed, within.argmax(-1, keepdim=True), at)
    return (blocks * BLOCK + at)[:, 0].tolist()
