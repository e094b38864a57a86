"""What is kept of a request: deadlines, deaths, bytes; and that nothing is kept too long."""

from __future__ import annotations

import pytest

from broker.inflight import InFlight, Job, State
from broker.protocol import Submit


def job(number: int, client: bytes = b"c", deadline: float = 10.0) -> Job:
    return Job(
        key=(client, f"r{number}"), number=number, submit=Submit(id=f"r{number}"), model="m",
        request=b"12345", chunks=[b"12"], arrived=0.0, deadline=deadline, delimited=False,
    )  # fmt: skip


def test_states_follow_the_table() -> None:
    one = job(1)
    one.move(State.RUNNING)
    one.move(State.QUEUED)
    one.move(State.ENDED)
    with pytest.raises(AssertionError, match="request 1"):
        one.move(State.RUNNING)


def test_bytes_are_the_request_s_and_its_chunks() -> None:
    one = job(1)
    assert one.size == 7
    one.keep_chunk(b"abc", 1)
    assert (one.size, one.tokens, one.chunks) == (10, 1, [b"12", b"abc"])


def test_the_overdue_are_named_once_and_the_ended_never() -> None:
    kept = InFlight()
    jobs = [job(n, deadline=float(n)) for n in range(1, 4)]
    for one in jobs:
        kept.add(one, 0.0)
    kept.remove(jobs[0])
    assert kept.overdue(2.5) == [jobs[1]]
    assert kept.overdue(2.5) == []


def test_an_id_that_was_used_before_keeps_its_own_deadline() -> None:
    kept = InFlight()
    old, new = job(1, deadline=1.0), job(2, deadline=9.0)
    new.key, new.submit = old.key, old.submit
    kept.add(old, 0.0)
    kept.remove(old)
    kept.add(new, 0.0)
    assert kept.overdue(5.0) == []


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    kept = InFlight()
    for n in range(10_000):
        one = job(n, deadline=1e6)
        kept.add(one, 0.0)
        kept.remove(one)
    assert len(kept._deadlines) < 1100 and kept.clients == {}


def test_output_clears_and_a_death_before_any_output_means_quarantine() -> None:
    one = job(1)
    one.note_death(2)
    assert one.suspect and one.quarantined
    one.keep_chunk(b"", 1)
    assert not one.suspect and not one.quarantined
    one.note_death(2)
    assert one.suspect and not one.quarantined, "it was under way"


@pytest.mark.parametrize(
    ("deaths", "in_all", "alone", "poison"),
    [
        (1, 1, True, False),
        (2, 2, True, True),
        (2, 2, False, False),
        (3, 3, False, True),
        (1, 16, False, True),
    ],
)
def test_who_is_poison(deaths: int, in_all: int, alone: bool, poison: bool) -> None:
    one = job(1)
    one.deaths, one.deaths_in_all = deaths, in_all
    assert one.is_poison(2, alone=alone) is poison
