"""The scheduler: budget, order, preemption, sharing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.pages import Pages
from gpu_worker.scheduler import Row, Scheduler, Step
from gpu_worker.sequence import Sequence

from .sequences import sequence


def scheduler(
    *, pages: int = 100, page_tokens: int = 4, slots: int = 8, step_tokens: int = 32, cache: bool = True
) -> Scheduler:
    return Scheduler(Pages(pages, page_tokens, prefix_cache=cache), slots=slots, step_tokens=step_tokens)


def run(sched: Scheduler) -> Step:
    """One step of a model that always says token 1; sequences leave when they are full."""
    step = sched.schedule()
    sched.check()
    assert_rows_have_pages(sched, step)
    for row in step.rows:
        sched.computed(row)
        if row.samples:
            row.sequence.token_ids.append(1)
            if not row.sequence.remaining_tokens:
                sched.remove(row.sequence)
    sched.check()
    return step


def assert_rows_have_pages(sched: Scheduler, step: Step) -> None:
    for row in step.rows:
        end = row.sequence.computed + row.tokens
        assert len(row.sequence.pages) >= sched.pages.needed(end)
        assert row.samples == (end == len(row.sequence.token_ids))


def shape(step: Step) -> list[tuple[str, int]]:
    return [(row.sequence.id, row.tokens) for row in step.rows]


def started(sched: Scheduler, *sequences: Sequence) -> None:
    """Add sequences and step until all decode."""
    for seq in sequences:
        sched.add(seq)
    while any(seq.uncomputed > 1 for seq in sequences):
        run(sched)


def test_a_prompt_that_fits_the_budget_is_one_row_that_samples() -> None:
    sched = scheduler()
    sched.add(sequence(prompt=5))
    (row,) = run(sched).rows
    assert (row.tokens, row.samples) == (5, True)


def test_a_long_prompt_is_computed_in_pieces_and_samples_at_its_end() -> None:
    sched = scheduler(step_tokens=16)
    sched.add(sequence(prompt=40))
    rows = [run(sched).rows[0] for _ in range(3)]
    assert [(row.tokens, row.samples) for row in rows] == [(16, False), (16, False), (8, True)]


def test_running_rows_come_first_and_a_long_prompt_gets_the_rest() -> None:
    sched = scheduler(step_tokens=16)
    started(sched, sequence(id="a", max_tokens=50), sequence(prompt=6, id="b", max_tokens=50))
    sched.add(sequence(prompt=[7] * 100, id="long"))
    for _ in range(7):
        assert shape(run(sched)) == [("a", 1), ("b", 1), ("long", 14)]


def test_no_step_is_larger_than_the_budget() -> None:
    sched = scheduler(step_tokens=16, slots=64)
    for number in range(40):
        sched.add(sequence(prompt=[number] * 9, id=str(number)))
    while len(sched):
        assert sum(row.tokens for row in run(sched).rows) <= 16


def test_no_more_run_than_there_are_slots() -> None:
    sched = scheduler(slots=2)
    for name in "abc":
        sched.add(sequence(prompt=[ord(name)] * 5, id=name))
    assert [row.sequence.id for row in run(sched).rows] == ["a", "b"]
    assert sched.running == 2 and len(sched) == 3


def test_more_slots_than_step_tokens_let_every_runner_have_its_token() -> None:
    sched = scheduler(slots=64, step_tokens=16)
    for number in range(30):
        sched.add(sequence(prompt=[number], id=str(number), max_tokens=3))
    assert len(run(sched).rows) == 16


def test_when_pages_run_out_the_youngest_gives_way_and_comes_back() -> None:
    sched = scheduler(pages=6, page_tokens=2, cache=False)
    old, young = sequence(prompt=2, id="old", max_tokens=9), sequence(prompt=3, id="young", max_tokens=8)
    started(sched, old, young)
    preempted, order = 0, []
    while len(sched):
        step = run(sched)
        preempted += step.preempted
        order += [row.sequence.id for row in step.rows if row.sequence.remaining_tokens == 0]
    assert preempted == 1
    assert order == ["old", "young"]
    assert young.output_tokens == 8


def test_a_preempted_sequence_keeps_its_tokens_and_is_computed_again() -> None:
    sched = scheduler(pages=4, page_tokens=2, cache=False)
    old, young = sequence(prompt=2, id="old", max_tokens=6), sequence(prompt=2, id="young", max_tokens=6)
    started(sched, old, young)
    while young.pages:
        run(sched)
    assert young.output_tokens > 0 and young.computed == 0
    run_until_alone = [run(sched) for _ in range(50) if len(sched) > 1]
    assert run_until_alone
    (row,) = sched.schedule().rows
    assert row.sequence is young and row.tokens == len(young.token_ids)


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    sched = scheduler(pages=10, page_tokens=2, cache=False)
    started(sched, sequence(prompt=8, id="first", max_tokens=8))
    sched.add(sequence(prompt=[3] * 14, id="large", max_tokens=2))
    sched.add(sequence(prompt=1, id="small", max_tokens=2))
    assert shape(run(sched)) == [("first", 1)]


def test_a_request_that_can_never_fit_is_known() -> None:
    sched = scheduler(pages=4, page_tokens=4)
    assert sched.can_ever_fit(16)
    assert not sched.can_ever_fit(17)


def test_a_shared_beginning_is_computed_once() -> None:
    sched = scheduler(page_tokens=4)
    started(sched, sequence(prompt=10, id="first"))
    second = sequence(prompt=10, id="second")
    sched.add(second)
    assert shape(run(sched))[1:] == [("second", 2)]
    assert second.cached_tokens == 8


def test_one_token_is_left_to_compute_even_if_all_pages_are_cached() -> None:
    sched = scheduler(page_tokens=4)
    started(sched, sequence(prompt=8, id="first"))
    sched.add(sequence(prompt=8, id="second"))
    assert shape(run(sched))[1:] == [("second", 4)]


def test_who_shares_what_is_being_computed_waits_for_it() -> None:
    sched = scheduler(page_tokens=4, step_tokens=16)
    sched.add(sequence(prompt=30, id="first"))
    sched.add(sequence(prompt=30, id="second"))
    assert shape(run(sched)) == [("first", 16)]
    assert shape(run(sched)) == [("first", 14)]
    assert shape(run(sched)) == [("first", 1), ("second", 2)]


def test_output_is_shared_as_well() -> None:
    sched = scheduler(page_tokens=4)
    first = sequence(prompt=4, id="first", max_tokens=8)
    started(sched, first)
    while len(sched):
        run(sched)
    sched.add(sequence(prompt=first.token_ids, id="next turn"))
    assert shape(run(sched)) == [("next turn", 4)]


def test_prompt_logprobs_use_nothing_of_the_cache() -> None:
    sched = scheduler(page_tokens=4)
    started(sched, sequence(prompt=10, id="first"))
    sched.add(sequence(prompt=10, id="second", prompt_logprobs=1))
    assert shape(run(sched))[1:] == [("second", 10)]


def test_a_tainted_sequence_leaves_nothing_to_share() -> None:
    sched = scheduler(page_tokens=4)
    bad = sequence(prompt=10, id="bad")
    started(sched, bad)
    sched.remove(bad, tainted=True)
    sched.add(sequence(prompt=10, id="next"))
    assert shape(run(sched)) == [("next", 10)]


def test_a_waiting_sequence_can_be_removed() -> None:
    sched = scheduler(slots=1)
    first, second = sequence(id="first"), sequence(id="second")
    sched.add(first)
    sched.add(second)
    run(sched)
    sched.remove(second)
    assert list(sched) == [first]


def test_a_budget_cut_for_memory_grows_again() -> None:
    sched = scheduler(step_tokens=64)
    sched.shrink()
    assert sched.budget == 32
    for _ in range(10):
        sched.shrink()
    assert sched.budget == 16
    for _ in range(1000):
        sched.went_well()
    assert sched.budget == 64


def test_a_prompt_gets_on_even_if_the_cut_budget_is_spent_on_streams() -> None:
    sched = scheduler(slots=40, step_tokens=64)
    started(sched, *(sequence([number, 1], id=str(number), max_tokens=90) for number in range(30)))
    sched.add(sequence(prompt=[50] * 6, id="prompt"))
    sched.shrink()
    sched.shrink()
    assert sched.budget < 30
    pieces = [shape(run(sched))[30:] for _ in range(5)]
    assert pieces == [[("prompt", 1)]] * 5


def test_a_row_shortened_after_a_fault_goes_on_where_it_stopped() -> None:
    sched = scheduler()
    seq = sequence(prompt=10)
    sched.add(seq)
    sched.schedule()
    sched.computed(Row(seq, 3, samples=False))
    sched.check()
    assert shape(sched.schedule()) == [("a", 7)]


def test_check_names_what_disagrees() -> None:
    sched = scheduler()
    seq = sequence(prompt=10)
    started(sched, seq)
    seq.computed = 40
    with pytest.raises(AssertionError, match="a: 3 pages for 40 of 11 tokens"):
        sched.check()


Arrival = tuple[int, int, int, bool]  # at step, prompt tokens, output tokens, cancelled midway


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(1, 20), st.booleans()),
        min_size=1,
        max_size=14,
    ),
    pages=st.integers(10, 30),
    page_tokens=st.sampled_from([1, 2, 4, 16]),
    slots=st.integers(1, 6),
    step_tokens=st.integers(4, 24),
    cache=st.booleans(),
)
def test_everybody_ends_with_all_tokens_and_the_accounts_are_right_after_every_step(
    arrivals: list[Arrival], pages: int, page_tokens: int, slots: int, step_tokens: int, cache: bool
) -> None:
    sched = scheduler(pages=pages, page_tokens=page_tokens, slots=slots, step_tokens=step_tokens, cache=cache)
    pending = sorted(enumerate(arrivals), key=lambda entry: entry[1][0])
    everybody: list[Sequence] = []
    doomed: list[Sequence] = []
    for step_number in range(5000):
        while pending and pending[0][1][0] <= step_number:
            number, (_, prompt, output, cancelled) = pending.pop(0)
            seq = sequence(prompt=prompt, max_tokens=output, id=str(number))
            if sched.can_ever_fit(seq.most_tokens):
                sched.add(seq)
                (doomed if cancelled else everybody).append(seq)
        if doomed and step_number % 3 == 2:
            gone = doomed.pop()
            if gone.remaining_tokens:
                sched.remove(gone)
        decoding = [s for s in sched if s.pages and s.uncomputed == 1]
        lengths = {s: len(s.token_ids) for s in decoding}
        oldest = next(iter(sched), None)
        step = run(sched)
        assert oldest is None or oldest in [row.sequence for row in step.rows], "the oldest had to wait"
        if not step.preempted:
            assert all(len(s.token_ids) == lengths[s] + 1 for s in decoding), "a stream waited for a step"
        if not pending and not len(sched):
            break
    assert not len(sched)
    assert all(s.remaining_tokens == 0 for s in everybody)
    assert sched.pages.used == 0
