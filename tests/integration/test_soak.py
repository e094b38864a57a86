"""One minute of `tests.soak`, with a kill every twenty seconds."""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_minute_of_load_with_cancels_and_kills_loses_nothing_and_leaks_nothing(pool: Pool) -> None:
    found = await soak(pool, 65, kill_every_s=20)
    assert found.faults == [], found.faults[:5]
    assert found.requests > 500 and found.kills >= 3
    assert found.longest_pause_s < 6
    assert found.memory_growth_mib_per_min < 10
    assert found.descriptors_growth <= 4
