"""A draw is a pure function of seed and position, and behaves like chance."""

from __future__ import annotations

import numpy as np

from gpu_worker.draws import uniforms


def test_a_draw_depends_on_its_own_seed_and_position_only() -> None:
    alone = uniforms([7], [42])[0]
    crowd = uniforms([1, 7, 9, 2**63 - 1], [5, 42, 42, 0])
    assert crowd[1] == alone


def test_known_draws_stay_as_they_are() -> None:
    # A change here breaks continuation between workers of different versions.
    assert uniforms([0, 1, -1, 2**63 - 1], [0, 0, 7, 123456]).tolist() == uniforms_in_plain_python(
        [(0, 0), (1, 0), (-1, 7), (2**63 - 1, 123456)]
    )


def uniforms_in_plain_python(keys: list[tuple[int, int]]) -> list[float]:
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    return [
        (mix((mix((seed + gamma) & mask) + gamma * (position + 1)) & mask) >> 11) / 2**53
        for seed, position in keys
    ]


def test_draws_are_uniform_over_positions_and_over_seeds() -> None:
    count = 20_000
    for drawn in (uniforms([3] * count, range(count)), uniforms(range(count), [10] * count)):
        assert drawn.min() >= 0 and drawn.max() < 1
        counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
        chi_squared = float(((counts - count / 20) ** 2 / (count / 20)).sum())
        assert chi_squared < 43.8  # 19 degrees of freedom, p = 0.001


def test_neighbours_are_uncorrelated() -> None:
    count = 20_000
    along = uniforms([3] * count, range(count))
    beside = uniforms([4] * count, range(count))
    for other in (beside, np.roll(along, 1)):
        assert abs(np.corrcoef(along, other)[0, 1]) < 0.03
