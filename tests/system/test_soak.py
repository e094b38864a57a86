"""One minute of `make soak`: nothing lost, nothing grown."""

from __future__ import annotations

import pytest

from tests.system import soak
from tests.system.supervised import supervised

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_a_minute_of_load_with_cancels_and_kills_leaves_nothing_behind() -> None:
    with supervised() as place:
        soak.prepare(place)
        report = await soak.soak(place, 60, kill_every_s=15)
    assert report.faults == []
    assert report.requests > 800 and report.kills >= 3
    assert report.left_in_flight == 0
    assert report.longest_pause_s <= 6
    assert report.broker_grown_mib < 10
    assert report.broker_grown_descriptors <= 4
