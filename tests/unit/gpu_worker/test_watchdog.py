"""A step that never returns is noticed; an idle engine and a paused process aren't mistaken for one."""

from __future__ import annotations

from gpu_worker.exchange import Counters
from gpu_worker.watchdog import Watchdog


def test_work_without_a_step_for_longer_than_the_limit_has_hung() -> None:
    counters = Counters(running=1)
    dog = Watchdog(counters, 10, now=0)
    assert [dog.hung(now) for now in range(1, 13)] == [False] * 10 + [True, True]


def test_a_step_in_between_is_a_sign_of_life() -> None:
    counters = Counters(running=1)
    dog = Watchdog(counters, 10, now=0)
    for now in range(1, 40):
        counters.steps = now // 5
        assert not dog.hung(now)


def test_an_idle_engine_never_hangs() -> None:
    dog = Watchdog(Counters(running=0), 10, now=0)
    assert not any(dog.hung(now) for now in range(1, 100))


def test_c69_a_pause_of_the_whole_process_is_nobodys_fault() -> None:
    counters = Counters(running=1)
    dog = Watchdog(counters, 10, now=0)
    dog.hung(1)
    assert not dog.hung(60)
    assert not dog.hung(61)
