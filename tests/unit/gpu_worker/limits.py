"""Sampling parameters that limit a draw in every way, for tests of the ways to draw."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

KINDS: Final[list[dict[str, Any]]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 40, "temperature": 0.7},
    {"top_k": 3000},
    {"top_k": 15_000, "top_p": 0.99, "temperature": 2.0},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
]


def peaks_of(logits: Tensor) -> list[float]:
    """Each row's largest."""
    peaks: list[float] = logits.amax(-1).tolist()
    return peaks
