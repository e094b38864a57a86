"""The checker that everything else relies on finds each kind of fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.protocol import Chunk, Done, Outcome, Usage
from tests.history import History


def outcome(tokens: int) -> Outcome:
    return Outcome("stop", Usage(1, tokens))


def good() -> History:
    history = History()
    history.begin("a", "xyz", streams=True)
    history.chunk("a", Chunk(0, [1], "x"))
    history.chunk("a", Chunk(1, [2, 3], "yz"))
    history.done("a", Done("a", attempts=1), outcome(3))
    return history


def test_a_clean_history_has_no_faults() -> None:
    good().check()


def spoil_end(history: History) -> None:
    history.failed("a", "cancelled")


def spoil_nothing_came(history: History) -> None:
    history.begin("b", None, streams=True)


def spoil_repeat(history: History) -> None:
    history.chunk("a", Chunk(1, [2, 3], ""))


def spoil_gap(history: History) -> None:
    history.chunk("a", Chunk(9, [2], ""))


def spoil_text(history: History) -> None:
    history.records["a"].expected = "other"


def spoil_error(history: History) -> None:
    history.begin("b", None, streams=False)
    history.failed("b", "internal_error")


def spoil_given_up(history: History) -> None:
    history.give_up("a")


def spoil_missing(history: History) -> None:
    history.begin("b", None, streams=False)
    history.done("b", Done("b"), outcome(5))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_end, "2 ends"), (spoil_nothing_came, "0 ends"), (spoil_repeat, "where 3 was due"),
        (spoil_gap, "where 3 was due"), (spoil_text, "expected 'other'"), (spoil_error, "internal_error"),
        (spoil_given_up, "given up"), (spoil_missing, "2 ends"),
    ],
)  # fmt: skip
def test_each_kind_of_fault_is_found(spoil: Callable[[History], None], said: str) -> None:
    history = good()
    spoil(history)
    with pytest.raises(AssertionError, match=said):
        history.check()


def test_a_pause_is_measured_between_events() -> None:
    history = good()
    record = history.records["a"]
    record.chunks = [(1.0, 0, 1, "x"), (4.0, 1, 2, "yz")]
    record.ends = [(4.5, "done")]
    assert history.longest_pause_s == 3.0
