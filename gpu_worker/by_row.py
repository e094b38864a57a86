"""Draws on a CPU: row by row in numpy, so that a row stays in the cache from its logits to its token.

Torch's operations on all rows at once, which `batched` has for other devices, wait here for memory and for
each other's threads. The rule is the same, and a row's neighbours can't matter.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from .sequence import SamplingParams

WIDTHS: Final = (1024, 8192)  # heaviest tokens looked at for top_p, before the whole row is
BLOCK: Final = 256  # tokens summed at once

Weights = NDArray[np.float32]


def draw(
    logits: Tensor, params: Items[SamplingParams], peaks: Items[float], draws: NDArray[np.float64]
) -> list[int]:
    """One token per row.

    Args:
        logits: float32 [rows, vocab] on the CPU.
        params: of the rows, in order.
        peaks: each row's largest logit, finite.
        draws: [rows] in [0, 1).
    """
    rows = logits.numpy()
    return [
        _draw(row, its, peak, float(number))
        for row, its, peak, number in zip(rows, params, peaks, draws, strict=True)
    ]


def _draw(row: Weights, params: SamplingParams, peak: float, number: float) -> int:
    weights = row - np.float32(peak)
    weights /= np.float32(params.temperature)
    np.exp(weights, out=weights)  # the likeliest token's is 1
    k = params.top_k if 0 < params.top_k < len(row) else 0
    floor = max(params.min_p, _floor(weights, k, params.top_p))
    if floor <= 0:
        return _passed(weights, number)
    tokens = np.flatnonzero(weights >= np.float32(floor))
    return int(tokens[_passed(weights[tokens], number)])


def _floor(weights: Weights, k: int, p: float) -> float:
    """The least weight that top_k and top_p (of what top_k leaves) let in; a k of 0 is no limit."""
    if k:
        heaviest = _heaviest(weights, k)
        return float(heaviest[_passing(heaviest, p) if p < 1 else -1])
    if p >= 1:
        return 0.0
    needed = p * float(weights.sum())
    for width in WIDTHS:
        if width < len(weights):
            heaviest = _heaviest(weights, width)
            sums = heaviest.cumsum(dtype=np.float64)
            if sums[-1] >= needed:
                return float(heaviest[np.searchsorted(sums, needed)])
    heaviest = _heaviest(weights, len(weights))
    return float(heaviest[_passing(heaviest, p)])


def _heaviest(weights: Weights, width: int) -> Weights:
    """The so many largest weights, largest first."""
    largest = np.partition(weights, len(weights) - width)[-width:]
    largest.sort()
    return largest[::-1]


def _passing(heaviest: Weights, p: float) -> int:
    """Where the sum reaches p times all of it."""
    sums = heaviest.cumsum(dtype=np.float64)
    return min(int(np.searchsorted(sums, p * sums[-1])), len(sums) - 1)


def _passed(weights: Weights, number: float) -> int:
    """The place at which the cumulative weights pass that share of them all; never a place of no weight."""
    first = 0
    target = None
    if len(weights) > 2 * BLOCK:
        sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)).cumsum(dtype=np.float64)
        target = min(number * sums[-1], np.nextafter(sums[-1], 0))
        block = int(np.searchsorted(sums, target, side="right"))
        target -= sums[block - 1] if block else 0.0
        first = block * BLOCK
        weights = weights[first : first + BLOCK]
    sums = weights.cumsum(dtype=np.float64)
    at = int(np.searchsorted(sums, number * sums[-1] if target is None else target, side="right"))
    # Rounding may lead past the last weight: then the heaviest token is taken.
    if at >= len(weights) or not weights[at]:
        at = int(weights.argmax())
    return first + at
