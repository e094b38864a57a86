"""A short flood in every test run; `python -m tests.fuzz.flood` sends a million."""

from __future__ import annotations

from tests.fuzz.flood import flood
from tests.pool import running_pool


def test_a_flood_of_random_messages_is_counted_and_hurts_nobody() -> None:
    with running_pool() as pool:
        measured = flood(pool, 30_000)
        assert pool.processes["broker"].poll() is None
        assert pool.status().workers, "the valid worker is still registered"
    assert measured.malformed > 10_000
    assert measured.memory_after_mib - measured.memory_before_mib < 20
    assert measured.flooded_p99_ms < 10 * measured.quiet_p99_ms + 100
