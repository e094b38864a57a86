"""The queue of one model: who goes first, what it counts, that its length costs nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest

from broker.fairness import Fairness
from broker.inflight import Job
from broker.protocol import Submit
from broker.waiting import Waiting


class Line:
    """A queue and the fairness behind it."""

    def __init__(self) -> None:
        self.fairness = Fairness()
        self.queue = Waiting(self.fairness)
        self.number = 0

    def job(self, id: str, **header: Any) -> Job:
        self.number += 1
        return Job(
            key=(b"c", id), number=self.number, submit=Submit(id=id, **header), model="m",
            request=b"x" * 10, chunks=[], arrived=float(self.number), deadline=1e9, delimited=False,
        )  # fmt: skip

    def add(self, id: str, **header: Any) -> Job:
        job = self.job(id, **header)
        self.fairness.enter(job.submit.tenant)
        self.queue.add(job)
        return job

    def begun(self, id: str, *, quarantined: bool = False) -> Job:
        job = self.job(id)
        job.dispatches, job.quarantined = 1, quarantined
        self.fairness.enter("")
        return job

    def serve(self) -> str:
        """Take out the first, as a worker would."""
        job = self.queue.first()
        assert job is not None
        self.queue.remove(job)
        self.fairness.begin(job.submit.tenant, job.submit.cost)
        return job.submit.id

    def order(self) -> list[str]:
        return [self.serve() for _ in range(len(self.queue))]


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    line = Line()
    for id in ("a", "b", "c"):
        line.add(id)
    assert line.order() == ["a", "b", "c"]


def test_a_higher_class_goes_first() -> None:
    line = Line()
    for id, level in (("late", 9), ("usual", 5), ("soon", 0), ("usual too", 5)):
        line.add(id.replace(" ", "-"), priority=level)
    assert line.order() == ["soon", "usual", "usual-too", "late"]


def test_a_thousand_requests_of_one_tenant_do_not_starve_another_s_one() -> None:
    line = Line()
    for n in range(1000):
        line.add(f"many{n}", tenant="many", cost=100)
    assert line.serve() == "many0"
    line.add("one", tenant="one", cost=100)
    assert line.serve() == "one"


def test_two_backlogged_tenants_get_equal_tokens_though_their_requests_differ() -> None:
    line = Line()
    served = {"long": 0, "short": 0}
    for n in range(1000):
        line.add(f"long{n}", tenant="long", cost=200)
        line.add(f"short{n}", tenant="short", cost=50)
    for _ in range(1000):
        job = line.queue.first()
        assert job is not None
        served[job.submit.tenant] += job.submit.cost
        line.serve()
    assert served["long"] == pytest.approx(served["short"], rel=0.1)


def test_what_was_begun_goes_ahead_of_all_in_order_of_arrival_and_quarantine_after_it() -> None:
    line = Line()
    first, second = line.begun("first"), line.begun("second")
    doubtful = line.begun("doubtful", quarantined=True)
    line.add("new", priority=0)
    for job in (doubtful, second, first):
        line.queue.add(job)
    assert line.queue.first(quarantined=False) is first
    assert line.order() == ["first", "second", "doubtful", "new"]


def test_quarantine_may_be_passed_over() -> None:
    line = Line()
    line.queue.add(line.begun("doubtful", quarantined=True))
    new = line.add("new")
    assert line.queue.first(quarantined=False) is new


def test_it_counts_requests_bytes_tenants_and_the_oldest() -> None:
    line = Line()
    assert line.queue.oldest() is None
    line.add("a", tenant="t")
    b = line.add("b", tenant="u", priority=0)
    line.queue.add(line.begun("c"))
    assert (len(line.queue), line.queue.bytes, line.queue.oldest()) == (3, 30, 1.0)
    assert line.queue.by_tenant() == {"t": 1, "u": 1, "": 1}
    line.queue.remove(b)
    assert (len(line.queue), line.queue.bytes) == (2, 20)
    assert sorted(job.submit.id for job in line.queue.jobs()) == ["a", "c"]


def test_a_hundred_thousand_that_wait_cost_no_more_per_turn_than_a_hundred() -> None:
    """Tenants are few here; the ratio is of two runs of one test, so the machine's speed doesn't matter."""

    def cost_of_a_turn(waiting: int) -> float:
        line = Line()
        for n in range(waiting):
            line.add(f"r{n}", tenant=f"t{n % 10}")
        best = float("inf")
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(15):
                line.serve()
            best = min(best, time.perf_counter() - begun)
        return best

    assert cost_of_a_turn(100_000) < 5 * cost_of_a_turn(100)
