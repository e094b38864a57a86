"""Credits, what a worker knows, and which worker gets a request."""

from __future__ import annotations

import pytest

from broker.inflight import Job
from broker.protocol import ModelInfo, Ready, Submit, WorkerBeat
from broker.workers import PREFIXES_KEPT, Worker, WorkerState, choose

NOW = 100.0


def worker(name: str, slots: int = 4) -> Worker:
    return Worker(name.encode(), Ready(name, "cpu", "here", 1, slots, [ModelInfo("m", 1, 1)]), NOW)


def job(id: str, cost: int = 10, prefix: list[int] | None = None) -> Job:
    return Job(
        key=(b"c", id), number=1, submit=Submit(id=id, cost=cost, prefix=prefix or []), model="m",
        request=b"", chunks=[], arrived=NOW, deadline=NOW, delimited=False, work_id=id,
    )  # fmt: skip


def test_free_slots_are_what_was_declared_less_what_is_in_hand() -> None:
    gpu = worker("gpu0", slots=2)
    taken = job("a", cost=7)
    gpu.take(taken, NOW)
    assert (gpu.free_slots, gpu.cost) == (1, 7)
    gpu.give(taken)
    assert (gpu.free_slots, gpu.cost) == (2, 0)


def test_a_draining_worker_has_no_free_slot() -> None:
    gpu = worker("gpu0")
    gpu.move(WorkerState.DRAINING)
    assert gpu.free_slots == 0


def test_a_worker_that_is_gone_does_not_come_back() -> None:
    gpu = worker("gpu0")
    gpu.move(WorkerState.GONE)
    with pytest.raises(AssertionError, match="gpu0"):
        gpu.move(WorkerState.READY)


def test_taking_more_than_the_slots_is_a_bug_that_shows() -> None:
    gpu = worker("gpu0", slots=1)
    gpu.take(job("a"), NOW)
    with pytest.raises(AssertionError, match="1 of 1"):
        gpu.take(job("b"), NOW)


def test_steps_that_move_show_that_it_is_not_stalled() -> None:
    gpu = worker("gpu0")
    gpu.take(job("a"), NOW)
    gpu.note_beat(WorkerBeat("", steps=0), NOW + 5)
    assert gpu.stepped == NOW
    gpu.note_beat(WorkerBeat("", steps=1), NOW + 6)
    assert gpu.stepped == NOW + 6


def test_the_least_loaded_gets_it() -> None:
    busy, idle = worker("busy"), worker("idle")
    busy.take(job("a", cost=100), NOW)
    assert choose([busy, idle], job("b"), margin=0) is idle


def test_the_one_that_knows_the_prefix_gets_it_within_the_margin() -> None:
    knows, idle = worker("knows"), worker("idle")
    knows.take(job("a", cost=100, prefix=[1, 2, 3]), NOW)
    wanted = job("b", prefix=[1, 2, 9])
    assert choose([knows, idle], wanted, margin=100) is knows
    assert choose([knows, idle], wanted, margin=99) is idle
    assert choose([knows, idle], job("c", prefix=[9, 1]), margin=100) is idle


def test_the_longer_match_wins() -> None:
    short, long = worker("short"), worker("long")
    short.take(job("a", prefix=[1]), NOW)
    long.take(job("b", prefix=[1, 2]), NOW)
    assert choose([short, long], job("c", prefix=[1, 2, 3]), margin=100) is long


def test_nobody_free_means_nobody() -> None:
    full = worker("full", slots=1)
    full.take(job("a"), NOW)
    assert choose([full], job("b"), margin=0) is None
    assert choose([], job("b"), margin=0) is None


def test_what_is_in_quarantine_goes_where_no_suspect_is() -> None:
    suspicious, clean = worker("suspicious"), worker("clean")
    suspect = job("a", cost=0)
    suspect.deaths = 1
    suspicious.take(suspect, NOW)
    clean.take(job("b", cost=100), NOW)
    doubtful = job("c")
    doubtful.quarantined = True
    assert choose([suspicious, clean], doubtful, margin=0) is clean
    assert choose([suspicious], doubtful, margin=0) is None


def test_remembered_prefixes_are_bounded_and_the_oldest_go_first() -> None:
    gpu = worker("gpu0", slots=4096)
    for n in range(PREFIXES_KEPT // 128 + 1):
        gpu.take(job(f"r{n}", prefix=list(range(128 * n, 128 * (n + 1)))), NOW)
    assert len(gpu.prefixes) == PREFIXES_KEPT
    assert gpu.known_blocks([0]) == 0 and gpu.known_blocks([PREFIXES_KEPT]) == 1
