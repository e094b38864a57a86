"""Which row is at fault, and what kind of fault it is."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
import torch

from broker.errors import InternalError, InvalidRequest, OutOfMemory
from broker.logs import Log
from gpu_worker import faults
from gpu_worker.faults import EngineBroken, FaultFinder
from gpu_worker.logprobs import TokenTexts
from gpu_worker.pages import Pages
from gpu_worker.scheduler import Row, Scheduler

from .fakes import FakeRunner, FakeSampler, letters, tokenizer
from .sequences import sequence

BAD = 99


class Bench:
    """A fault finder over sequences of which those that begin with `BAD` fail."""

    def __init__(self, problem: Exception, *, step_tokens: int = 64) -> None:
        def next_token(tokens: Sequence[int]) -> int:
            if tokens[0] == BAD:
                raise problem
            return letters(tokens)

        self.runner = FakeRunner(next_token)
        self.log = io.StringIO()
        self.scheduler = Scheduler(Pages(64, 4, prefix_cache=False), slots=16, step_tokens=step_tokens)
        log = Log("worker/test", stream=self.log)
        texts = TokenTexts(tokenizer())
        self.finder = FaultFinder(self.runner, FakeSampler(), self.scheduler, texts, log)  # type: ignore[arg-type]

    def rows(self, *prompts: list[int]) -> list[Row]:
        for number, prompt in enumerate(prompts):
            self.scheduler.add(sequence(prompt, id=str(number)))
        return self.scheduler.schedule().rows

    def failed(self, found: list[faults.Fault]) -> list[str]:
        return [fault.sequence.id for fault in found]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_free_memory", lambda: None)


@pytest.mark.parametrize("place", range(5))
def test_the_guilty_row_is_found_wherever_it_is(place: int) -> None:
    bench = Bench(ValueError("boom"))
    prompts = [[BAD if number == place else number, 1, 2] for number in range(5)]
    results, found = bench.finder.run(bench.rows(*prompts))
    assert bench.failed(found) == [str(place)]
    assert [row.sequence.id for row, _ in results] == [str(n) for n in range(5) if n != place]
    assert all(sampled.token_id == letters(row.sequence.token_ids) for row, sampled in results)
    assert isinstance(found[0].problem, InternalError) and not found[0].explained


def test_several_guilty_rows_are_found() -> None:
    bench = Bench(ValueError("boom"))
    _, found = bench.finder.run(bench.rows([BAD], [1], [BAD, 2], [3], [BAD, 4]))
    assert bench.failed(found) == ["0", "2", "4"]


def test_an_innocent_step_is_computed_in_one_piece() -> None:
    bench = Bench(ValueError("boom"))
    results, found = bench.finder.run(bench.rows([1], [2], [3]))
    assert (len(results), found, len(bench.runner.rows)) == (3, [], 1)


def test_a_documented_error_reaches_its_caller_as_it_is() -> None:
    bench = Bench(InvalidRequest("grammar: no", param="grammar"))
    _, found = bench.finder.run(bench.rows([BAD], [1]))
    assert found[0].problem.message == "grammar: no" and found[0].explained


def test_only_rows_that_were_computed_count_as_computed() -> None:
    bench = Bench(ValueError("boom"))
    rows = bench.rows([BAD, 1, 2], [3, 4])
    bench.finder.run(rows)
    assert [row.sequence.computed for row in rows] == [0, 2]


def test_c52_out_of_memory_that_stays_is_the_callers_after_smaller_and_smaller_pieces() -> None:
    bench = Bench(torch.OutOfMemoryError("CUDA out of memory"))
    _, found = bench.finder.run(bench.rows([BAD], [1]))
    assert isinstance(found[0].problem, OutOfMemory) and found[0].explained
    assert bench.scheduler.budget < 64


def test_a_cut_budget_splits_a_step_that_was_planned_for_more() -> None:
    bench = Bench(ValueError("boom"))
    rows = bench.rows(*([number] * 6 for number in range(8)))
    for _ in range(3):
        bench.scheduler.shrink()
    bench.finder.run(rows)
    assert [sum(tokens for _, tokens in piece) for piece in bench.runner.rows] == [12, 12, 12, 12]


def test_all_rows_at_once_failing_is_nobodys_fault() -> None:
    bench = Bench(ValueError("boom"))
    with pytest.raises(EngineBroken, match="all of 2 rows"):
        bench.finder.run(bench.rows([BAD], [BAD, 1]))


@pytest.mark.parametrize(
    "problem",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_lost_device_is_not_searched_for_the_guilty(problem: Exception) -> None:
    bench = Bench(problem)
    with pytest.raises(RuntimeError):
        bench.finder.run(bench.rows([BAD], [1]))
    assert bench.runner.rows == []


@pytest.mark.parametrize(
    ("problem", "starved"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_want_of_memory_is_told_from_other_faults(problem: Exception, starved: bool) -> None:
    assert faults._is_out_of_memory(problem) == starved


def test_an_exception_is_named_in_one_line() -> None:
    assert faults.brief(ValueError("one\ntwo")) == "ValueError: one"


def test_what_was_not_foreseen_is_logged_whole_and_told_in_a_neutral_sentence() -> None:
    stream = io.StringIO()
    problem = faults.unforeseen("client-7", ValueError("secret path"), Log("worker/test", stream=stream))
    assert "secret" not in problem.message
    assert "client-7" in stream.getvalue() and "secret path" in stream.getvalue()
