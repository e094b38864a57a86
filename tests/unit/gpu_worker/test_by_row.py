"""A row's token is what a slow reading of its limits and its number says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from gpu_worker import by_row
from gpu_worker.sequence import SamplingParams

from .limits import KINDS, peaks_of


def slowly(row: list[float], p: SamplingParams, number: float) -> int:
    """The token, worked out one by one in plain Python."""
    peak = max(row)
    weights = [math.exp((x - peak) / p.temperature) for x in row]
    ordered = sorted(weights, reverse=True)
    floor = p.min_p
    if p.top_k:
        ordered = ordered[: p.top_k]
        floor = max(floor, ordered[-1])
    sums = list(itertools.accumulate(ordered))
    if p.top_p < 1:
        floor = max(floor, next(w for w, s in zip(ordered, sums, strict=True) if s >= p.top_p * sums[-1]))
    inside = list(itertools.accumulate(w if w >= floor else 0.0 for w in weights))
    return next(token for token, s in enumerate(inside) if s > number * inside[-1])


@pytest.mark.parametrize("vocab", [3, 600, 20_000])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_is_what_the_limits_and_the_number_say(kind: dict[str, float], vocab: int) -> None:
    params = SamplingParams(max_tokens=1, **kind)  # type: ignore[arg-type]
    rows = 3 if vocab > 1000 else 20
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    numbers = np.random.default_rng(0).random(rows)
    drawn = by_row.draw(logits, [params] * rows, peaks_of(logits), numbers)
    # 32-bit weights may put a number that lies at the border of two tokens into either.
    differ = [
        row for row in range(rows) if drawn[row] != slowly(logits[row].tolist(), params, float(numbers[row]))
    ]
    assert not differ


@pytest.mark.parametrize("number", [0.0, 0.5, float(np.nextafter(1, 0))])
def test_no_number_leads_to_a_token_that_is_not_inside(number: float) -> None:
    logits = torch.full((1, 5000), -200.0)
    logits[0, [300, 4000]] = 0.0
    numbers = np.array([number])
    for kind in ({}, {"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.5}):
        params = SamplingParams(max_tokens=1, **kind)
        assert by_row.draw(logits, [params], [0.0], numbers)[0] in (300, 4000)
