"""Overload and fairness on real sockets: quick refusals, goodput, memory that comes back, equal shares."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from broker.client import AsyncClient
from tests.history import History
from tests.load import Ask, Load
from tests.pool import Pool, wait_for

SLOTS, TOKENS, STEPS_PER_S = 8, 10, 100.0
CAPACITY = SLOTS * STEPS_PER_S / TOKENS  # requests per second of one scripted worker: 80


def short(number: int, tenant: str = "") -> Ask:
    return Ask(f"request {number}", TOKENS, number, stream=False, tenant=tenant)


def memory_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def rate(history: History, seconds: float) -> float:
    return sum(record.ends[0][1] == "done" for record in history.records.values()) / seconds


async def test_at_ten_times_its_capacity_it_refuses_quickly_and_serves_as_much_as_before(pool: Pool) -> None:
    pid = pool.broker("--queue-limit", "200", "--log-level", "warning").pid
    pool.scripted("gpu0", "--slots", str(SLOTS), "--steps-per-s", str(STEPS_PER_S))
    async with AsyncClient(pool.clients) as client:
        full, over = History(), History()
        began = time.monotonic()
        await Load(client, full, short).at_once(4 * SLOTS, int(4 * CAPACITY))
        peak = rate(full, time.monotonic() - began)
        before, began = memory_mib(pid), time.monotonic()
        longest = 0

        async def watch() -> None:
            nonlocal longest
            while True:
                status = await asyncio.to_thread(pool.status)
                longest = max(longest, *(model.waiting for model in status.models))
                await asyncio.sleep(0.2)

        watching = asyncio.create_task(watch())
        await Load(client, over, lambda n: short(n, "over")).at_rate(10 * CAPACITY, 8.0)
        elapsed = time.monotonic() - began
        watching.cancel()
    ended = [record.ends for record in over.records.values()]
    assert all(len(ends) == 1 for ends in ended), "each ended once"
    assert {ends[0][1] for ends in ended} == {"done", "overloaded"}
    refused = sorted(r.latency_s for r in over.records.values() if r.ends[0][1] == "overloaded")
    assert len(refused) > 0.7 * len(ended)
    assert refused[len(refused) // 2] < 0.5, (
        "at once, not when the queue has room; bench-broker has the times"
    )
    assert rate(over, elapsed) > 0.5 * peak
    assert 150 < longest <= 200, "the queue is at its limit"
    assert memory_mib(pid) - before < 50
    assert pool.status().in_flight == 0


async def test_a_thousand_queued_requests_of_one_tenant_hardly_delay_another_s_single_ones(
    pool: Pool,
) -> None:
    """Counted in turns, not in time: at most the running one and one more of the crowd go before it."""
    pool.broker()
    pool.scripted("gpu0", "--slots", "1", "--steps-per-s", "200")
    async with AsyncClient(pool.clients) as client, AsyncClient(pool.clients) as other:
        history = History()
        crowd = Load(client, history, lambda n: short(n, "crowd"))
        for _ in range(1000):
            crowd.send()
        await asyncio.to_thread(wait_for, lambda: pool.status().models[0].waiting > 900, "the crowd")
        single = Load(other, History(), lambda n: short(n, "single"))
        overtaken = []
        for _ in range(20):
            before = pool.status().done
            await single.send()
            overtaken.append(pool.status().done - before - 1)
        assert sum(not record.ends for record in history.records.values()) > 100, "the crowd was there"
    assert sorted(overtaken)[18] <= 3, f"requests of the crowd that went before: {overtaken}"


async def test_two_backlogged_tenants_get_the_same_tokens(pool: Pool) -> None:
    pool.broker()
    pool.scripted("gpu0", "--slots", "4", "--steps-per-s", "500")
    tokens = {"short": 0, "long": 0}
    async with AsyncClient(pool.clients) as client:
        loads = {
            tenant: Load(client, History(), lambda n, t=tenant, k=count: Ask(f"{t} {n}", k, n, tenant=t))  # type: ignore[misc]
            for tenant, count in (("short", 5), ("long", 40))
        }
        for load in loads.values():
            for _ in range(1500 if load is loads["short"] else 200):
                load.send()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            await asyncio.sleep(0.05)
        for tenant, load in loads.items():
            records = load.history.records.values()
            tokens[tenant] = sum(count for record in records for _, _, count, _ in record.chunks)
            assert not all(record.ends for record in records), f"{tenant} had a backlog to the end"
    share = tokens["short"] / sum(tokens.values())
    assert 0.4 < share < 0.6, tokens
    assert statistics.fmean(tokens.values()) > 1000
