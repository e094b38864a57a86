"""A pool for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool, running_pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    """An empty pool: the test starts what it needs."""
    with running_pool() as running:
        yield running
