"""Compares everything that the broker keeps twice. Changes nothing; tests run it after every event."""

from __future__ import annotations

from broker.catalogue import LOBBY
from broker.inflight import State
from broker.lifecycle import Lifecycle


def check(life: Lifecycle) -> None:
    """Compare.

    Raises:
        AssertionError: with the numbers that disagree; a bug of ours.
    """
    _check_requests(life)
    _check_queues(life)
    _check_workers(life)
    tenants = {job.submit.tenant for job in life.in_flight.jobs()}
    counted = set(life.fairness.served)
    assert counted == tenants, f"counters for {counted}, requests of {tenants}"


def _check_requests(life: Lifecycle) -> None:
    jobs = {job.key: job for job in life.in_flight.jobs()}
    queued = {job.key for queue in life.queues.values() for job in queue.jobs()}
    running = {job.key for worker in life.workers.values() for job in worker.jobs.values()}
    assert len(jobs) == life.in_flight.count, f"{len(jobs)} requests kept, {life.in_flight.count} counted"
    assert not queued & running, f"queued and running: {queued & running}"
    assert set(jobs) == queued | running, f"in one place only: {set(jobs) ^ (queued | running)}"
    for job in jobs.values():
        assert (job.state is State.QUEUED) == (job.key in queued), f"{job.key} is {job.state}"
        size = len(job.request) + sum(map(len, job.chunks))
        assert job.size == size, f"{job.key} counts {job.size} bytes, has {size}"
    assert all(client.jobs for client in life.in_flight.clients.values()), "a client without requests is kept"


def _check_queues(life: Lifecycle) -> None:
    for name, queue in life.queues.items():
        waiting = queue.jobs()
        assert len(queue) == len(waiting) > 0, f"queue {name!r} counts {len(queue)}, has {len(waiting)}"
        size = sum(job.size for job in waiting)
        assert queue.bytes == size, f"queue {name!r} counts {queue.bytes} bytes, has {size}"
        assert sum(queue.by_tenant().values()) == len(waiting), f"queue {name!r}: {queue.by_tenant()}"
        models = {job.model for job in waiting}
        assert models == {name}, f"queue {name!r} holds requests of {models}"
        assert name == LOBBY or name in life.catalogue.models, f"a queue for {name!r}, which nobody served"
        free = [w for w in life.catalogue.workers_of(name).values() if w.free_slots]
        able = [w.name for w in free if not w.suspects or queue.first(quarantined=False) is not None]
        assert not able, f"{len(waiting)} wait for {name!r} though {able} have free slots"


def _check_workers(life: Lifecycle) -> None:
    for worker in life.workers.values():
        assert len(worker.jobs) <= worker.ready.slots, f"{worker.name}: {len(worker.jobs)} in hand"
        cost = sum(job.submit.cost for job in worker.jobs.values())
        assert cost == worker.cost, f"{worker.name} counts {worker.cost}, has {cost}"
        suspects = {id for id, job in worker.jobs.items() if job.suspect}
        assert suspects == worker.suspects, f"{worker.name} counts {worker.suspects}, has {suspects}"
        for job in worker.jobs.values():
            assert job.worker == worker.identity, f"{job.key} is with {job.worker!r}, not {worker.name}"
    serving = {who for served in life.catalogue.models.values() for who in served.workers}
    assert serving == set(life.workers), f"serving {serving}, registered {set(life.workers)}"
