"""All rows at once give what each gives alone, and what `by_row` gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker import batched, by_row
from gpu_worker.sequence import SamplingParams

from .limits import KINDS, peaks_of


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows(vocab: int) -> tuple[torch.Tensor, list[SamplingParams], np.ndarray]:
    count = 3 * len(KINDS)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    params = [SamplingParams(max_tokens=1, **KINDS[row % len(KINDS)]) for row in range(count)]
    return logits, params, np.random.default_rng(0).random(count)


@pytest.mark.parametrize("vocab", [3, 600, 20_000])
def test_all_at_once_is_the_same_as_row_by_row(vocab: int) -> None:
    logits, params, numbers = rows(vocab)
    peaks = peaks_of(logits)
    together = batched.draw(logits.to(device()), params, peaks, numbers)
    assert together == by_row.draw(logits, params, peaks, numbers)


@pytest.mark.parametrize("vocab", [600, 20_000])
def test_c45_neighbours_do_not_matter(vocab: int) -> None:
    logits, params, numbers = rows(vocab)
    logits, peaks = logits.to(device()), peaks_of(logits)
    together = batched.draw(logits, params, peaks, numbers)
    alone = [
        batched.draw(logits[r : r + 1], params[r : r + 1], peaks[r : r + 1], numbers[r : r + 1])[0]
        for r in range(len(params))
    ]
    assert together == alone


@pytest.mark.parametrize("number", [0.0, 0.5, float(np.nextafter(1, 0))])
def test_no_number_leads_to_a_token_that_is_not_inside(number: float) -> None:
    logits = torch.full((1, 5000), -200.0, device=device())
    logits[0, [300, 4000]] = 0.0
    for kind in ({}, {"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.5}):
        params = SamplingParams(max_tokens=1, **kind)
        assert batched.draw(logits, [params], [0.0], np.array([number]))[0] in (300, 4000)
