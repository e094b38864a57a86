"""Whose turn it is: equal shares, no credit for idleness, no starvation, nothing kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.fairness import Fairness, LeastFirst


def test_one_that_comes_back_is_lifted_to_the_least_of_the_others() -> None:
    fairness = Fairness()
    fairness.enter("old")
    fairness.begin("old", 500)
    fairness.enter("new")
    assert fairness.served == {"old": 500, "new": 500}


def test_a_newcomer_wins_the_tie() -> None:
    fairness = Fairness()
    fairness.enter("a")
    fairness.begin("a", 100)
    fairness.enter("z")
    assert fairness.standing("z") < fairness.standing("a")


def test_a_tenant_without_requests_is_forgotten() -> None:
    fairness = Fairness()
    fairness.enter("a")
    fairness.enter("a")
    fairness.leave("a")
    assert fairness.served
    fairness.leave("a")
    assert not fairness.served


def test_a_refund_makes_a_turn_come_earlier() -> None:
    fairness = Fairness()
    members: dict[str, object] = {}
    line = LeastFirst(fairness, members)
    for tenant, tokens in (("a", 10), ("b", 20)):
        fairness.enter(tenant)
        fairness.begin(tenant, tokens)
        members[tenant] = None
        line.push(tenant)
    assert line.first() == "a"
    assert fairness.correct("b", -25)
    line.push("b")
    assert line.first() == "b"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["in", "out", "+", "-"])), max_size=200))
def test_the_first_is_always_the_least_whatever_happened(events: list[tuple[str, str]]) -> None:
    fairness = Fairness()
    members: dict[str, object] = {}
    line = LeastFirst(fairness, members)
    for n, (tenant, what) in enumerate(events):
        if what == "in" and tenant not in members:
            fairness.enter(tenant)
            members[tenant] = None
            line.push(tenant)
        elif what == "out" and tenant in members:
            del members[tenant]
            fairness.leave(tenant)
        elif what == "+" and tenant in members:
            fairness.begin(tenant, n % 7)
        elif what == "-" and tenant in members and fairness.correct(tenant, -(n % 5)):
            line.push(tenant)
        first = line.first()
        least = min(members, key=fairness.standing, default=None)
        assert (first is None) == (least is None)
        if first is not None and least is not None:
            assert fairness.standing(first) == fairness.standing(least)
        assert len(line._heap) <= 2 * len(members) + 17 + 2
