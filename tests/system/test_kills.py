"""Any process may be killed at any moment: under load, with supervisord, each request compared to the letter.

`CHAOS=5` makes each of these five times as long (`make chaos`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker.client import AsyncClient
from tests.history import History
from tests.load import Load, scripted_mix
from tests.pool import wait_for
from tests.system.supervised import Supervised, supervised

CHAOS = int(os.environ.get("CHAOS", "1"))
RATE = 20.0  # requests per second
WORKERS = ("worker0", "worker1")
MIB = 1024 * 1024

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200 * CHAOS)]


@pytest.fixture
def place() -> Iterator[Supervised]:
    """Two scripted workers that supervisord restarts at once, however often they are killed."""
    with supervised() as place:
        place.scripted(flags="--steps-per-s 100 --slots 32")
        place.override("[program:worker]\nstartsecs=0\n[program:broker]\nstartsecs=0\n", "zz-kills")
        place.start_ready()
        wait_for(lambda: len(place.status().workers) == 2, "both workers")
        yield place


@contextlib.asynccontextmanager
async def load(place: Supervised) -> AsyncIterator[Load]:
    """A mixed load at RATE until the body has ended; then everything must have ended."""
    async with AsyncClient(place.clients) as client:
        await client.wait_ready()
        running = Load(client, History(), scripted_mix, timeout_s=100)
        stop = asyncio.Event()
        task = asyncio.ensure_future(_send(running, stop))
        try:
            yield running
        finally:
            stop.set()
            await task


async def _send(running: Load, stop: asyncio.Event) -> None:
    clock = asyncio.get_running_loop().time
    began, ended = clock(), []
    while not stop.is_set():
        ended.append(running.send())
        await asyncio.sleep(max(0.0, began + len(ended) / RATE - clock()))
    await asyncio.gather(*ended)


async def pool_is_whole(place: Supervised, *, without: frozenset[int] = frozenset()) -> None:
    """Wait until both workers are registered, with other pids than those."""

    def whole() -> bool:
        workers = place.status().workers
        return {w.name for w in workers} == set(WORKERS) and not without & {w.pid for w in workers}

    await asyncio.to_thread(wait_for, whole, "both workers to be registered")


async def worker_pid(place: Supervised, name: str) -> int:
    return await asyncio.to_thread(lambda: next(w.pid for w in place.status().workers if w.name == name))


async def kill_worker(place: Supervised, name: str) -> None:
    """SIGKILL one, and wait for its successor."""
    pid = await worker_pid(place, name)
    os.kill(pid, signal.SIGKILL)
    await pool_is_whole(place, without=frozenset({pid}))


async def kill_broker(place: Supervised) -> None:
    """SIGKILL it, and wait until its successor has both workers."""
    before = await asyncio.to_thread(place.status)
    os.kill(before.pid, signal.SIGKILL)

    def another() -> bool:
        return place.status().session != before.session

    await asyncio.to_thread(wait_for, another, "another broker")
    await pool_is_whole(place)


async def test_killed_workers_cost_no_request_and_at_most_a_short_pause(place: Supervised) -> None:
    async with load(place) as running:
        for number in range(6 * CHAOS):
            await kill_worker(place, WORKERS[number % 2])
            await asyncio.sleep(0.5)
    running.history.check()
    assert len(running.history.records) > 50
    assert running.history.longest_pause_s <= 6
    assert place.status().continuations > 0
    # supervisord's listener, or the broker's own send, tells of the end: far sooner than 4 s of silence.
    pauses = sorted(record.longest_pause_s for record in running.history.records.values() if record.streams)
    assert pauses[int(0.99 * len(pauses))] <= 1.5


async def test_a_worker_that_is_stopped_and_goes_on_later_adds_no_stray_token(place: Supervised) -> None:
    async with load(place) as running:
        pid = await worker_pid(place, "worker0")
        os.kill(pid, signal.SIGSTOP)
        await asyncio.to_thread(
            wait_for, lambda: not place.registered("worker0"), "the stopped worker to be taken for dead", 8
        )
        await asyncio.sleep(4 * CHAOS)
        os.kill(pid, signal.SIGCONT)
        await asyncio.to_thread(wait_for, lambda: place.registered("worker0"), "its return", 3)
        await asyncio.sleep(1)
    running.history.check()
    assert running.history.longest_pause_s <= 6
    assert await worker_pid(place, "worker0") == pid


async def test_a_killed_broker_costs_no_request(place: Supervised) -> None:
    async with load(place) as running:
        for _ in range(4 * CHAOS):
            await kill_broker(place)
            await asyncio.sleep(0.5)
    running.history.check()
    assert running.history.longest_pause_s <= 6


async def test_a_broker_and_a_worker_killed_together_cost_no_request(place: Supervised) -> None:
    async with load(place) as running:
        for number in range(2 * CHAOS):
            pid = await worker_pid(place, WORKERS[number % 2])
            os.kill(pid, signal.SIGKILL)
            await kill_broker(place)
            await asyncio.sleep(0.5)
    running.history.check()
    assert running.history.longest_pause_s <= 6


async def test_a_stopped_broker_is_waited_for(place: Supervised) -> None:
    async with load(place) as running:
        pid = (await asyncio.to_thread(place.status)).pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(6)  # longer than a worker's silence may last: the broker itself was away
        os.kill(pid, signal.SIGCONT)
        await pool_is_whole(place)
        await asyncio.sleep(1)
    running.history.check()
    assert place.status().worker_deaths == 0


async def test_without_any_worker_the_queue_fills_refusals_are_quick_and_all_is_well_after() -> None:
    with supervised() as place:
        place.scripted(flags="--steps-per-s 100 --slots 32")
        place.environment["LOADONCE_QUEUE_LIMIT"] = "60"
        place.start_ready()
        await pool_is_whole(place)
        async with load(place) as running:
            # Both within the same moment: a request that meets two deaths, one after the other, is given up.
            for pid in [await worker_pid(place, name) for name in WORKERS]:
                os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(place.ctl, "stop", "workers:*")
            await asyncio.sleep(6 * CHAOS if CHAOS < 3 else 15)
            await asyncio.to_thread(place.ctl, "start", "workers:*")
            await pool_is_whole(place)
            await asyncio.to_thread(
                wait_for, lambda: not place.status().models[0].waiting, "the queue to empty", 5
            )
        running.history.check(allowed=frozenset({"done", "overloaded", "unavailable"}))
        refused = [*running.history.ended_as("overloaded"), *running.history.ended_as("unavailable")]
        assert refused, "the queue never filled"
        quick = sorted(record.latency_s for record in refused)
        assert quick[int(0.99 * (len(quick) - 1))] < 0.5


@pytest.mark.parametrize("by", ["supervisorctl restart", "supervisorctl pool restart"])
async def test_a_rolling_restart_under_load_fails_no_request_and_cuts_no_stream(
    place: Supervised, by: str
) -> None:
    async with load(place) as running:
        before = {w.pid for w in place.status().workers}
        for _ in range(CHAOS):
            if by == "supervisorctl pool restart":
                done = await asyncio.to_thread(place.ctl, "pool", "restart")
                assert done.returncode == 0 and done.stdout.count("ready again") == 2, done.stdout
            else:
                for name in WORKERS:
                    assert (await asyncio.to_thread(place.ctl, "restart", f"workers:{name}")).returncode == 0
                    await pool_is_whole(place)
        after = {w.pid for w in place.status().workers}
    running.history.check()
    assert not before & after
    assert running.history.longest_pause_s <= 6
    assert all(record.attempts <= 3 for record in running.history.records.values())


async def test_many_restarts_leave_no_descriptor_and_no_memory_in_the_broker(place: Supervised) -> None:
    def held() -> tuple[int, float]:
        pid = place.status().pid
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return len(os.listdir(f"/proc/{pid}/fd")), resident / MIB

    async with load(place) as running:
        for _ in range(2):  # buffers and caches have their size after these
            await kill_worker(place, "worker0")
        descriptors, resident = held()
        for number in range(8 * CHAOS):
            pid = await worker_pid(place, WORKERS[number % 2])
            os.kill(pid, signal.SIGTERM if number % 3 else signal.SIGKILL)
            await pool_is_whole(place, without=frozenset({pid}))
        assert held()[0] <= descriptors + 4
        assert held()[1] <= resident + 20
    running.history.check()


async def test_an_updated_conf_brings_other_workers_and_fails_no_request(place: Supervised) -> None:
    """The hot change: edit, `supervisorctl update`; what waits is answered by the new workers."""
    async with load(place) as running:
        conf = place.directory / "run" / "test.conf"
        conf.write_text(conf.read_text().replace("--slots 32", "--slots 33"))
        done = await asyncio.to_thread(place.ctl, "update")
        assert "workers: updated process group" in done.stdout
        await pool_is_whole(place)
        assert {w.slots for w in place.status().workers} == {33}
    running.history.check()
