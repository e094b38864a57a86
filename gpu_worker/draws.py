"""The random draw for a token: a pure function of (seed, position), and of nothing else.

Counter-based, after SplitMix64 (Steele, Lea and Flood, *Fast Splittable Pseudorandom Number Generators*,
2014): two rounds of its finaliser over seed and position. Integer arithmetic only, so every machine and
every batch gives the same bits, and any worker can continue any stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS: Final = 53  # of a float64's significand


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One draw per row, uniform in [0, 1), float64 [rows].

    Args:
        seeds: any integers; 64 bits of each count.
        positions: index of the token to be drawn, prompt included.
    """
    state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(state + _GAMMA) + _GAMMA * (counter + np.uint64(1)))
    return np.ldexp((mixed >> np.uint64(64 - _BITS)).astype(np.float64), -_BITS)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
