"""Runs a step's rows so that a fault stays with the row that caused it. Knows nothing of text or the wire.

If a step fails, halves of it are tried, until the guilty row is alone. Computing a row again writes the same
keys and values to the same places, so trying again is safe.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from broker.errors import InternalError, LoadOnceError, OutOfMemory
from broker.logs import Log

from . import logprobs
from .sampler import Sampled, Sampler
from .scheduler import Row, Scheduler
from .sequence import Sequence

if TYPE_CHECKING:
    from .runner import Runner

#: So many steps in a row in which every row fails mean that it isn't the requests.
_HOPELESS_STEPS: Final = 3


class EngineBroken(Exception):  # noqa: N818 - what it means is in its sentence
    """No request is to blame, and going on is no use."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a row could not be computed; unexplained is what nobody had foreseen."""

    sequence: Sequence
    problem: LoadOnceError
    explained: bool


def fault(sequence: Sequence, problem: Exception, log: Log) -> Fault:
    """What to tell the caller of a request that failed; what was not foreseen is logged whole."""
    if isinstance(problem, LoadOnceError):
        return Fault(sequence, problem, explained=True)
    return Fault(sequence, unforeseen(sequence.request_id, problem, log), explained=False)


def unforeseen(request_id: str, problem: Exception, log: Log) -> InternalError:
    """Log an exception whole; the caller gets a neutral sentence."""
    log.error("request failed", exc=problem, id=request_id)
    return InternalError("The worker failed on this request.")


def brief(problem: Exception) -> str:
    """An exception in one line."""
    return f"{type(problem).__name__}: {problem}".split("\n", 1)[0][:300]


class FaultFinder:
    """Runs rows through the model and the sampler.

    Args:
        runner: computes rows.
        sampler: draws tokens.
        scheduler: is told what was computed, and when memory is short.
        texts: for the log-probabilities of prompts.
        log: gets the faults.
    """

    def __init__(
        self, runner: Runner, sampler: Sampler, scheduler: Scheduler, texts: logprobs.TokenTexts, log: Log
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._texts = texts
        self._log = log
        self._hopeless_steps = 0

    def run(self, rows: list[Row]) -> tuple[list[tuple[Row, Sampled]], list[Fault]]:
        """Compute and sample a step's rows, in pieces if memory is short.

        Returns:
            what was drawn for the rows that sample, and the rows that failed, which the caller must remove.

        Raises:
            EngineBroken: every row fails, again and again or all at once.
            RuntimeError: the device is lost.
        """
        faults: list[Fault] = []
        results: list[tuple[Row, Sampled]] = []
        for piece in _pieces(rows, self._scheduler.budget):
            results += self._attempt(piece, faults)
        hopeless = sum(not fault.explained for fault in faults) == len(rows)
        self._hopeless_steps = self._hopeless_steps + 1 if hopeless else 0
        if hopeless and (len(rows) > 1 or self._hopeless_steps >= _HOPELESS_STEPS):
            raise EngineBroken(f"all of {len(rows)} rows fail, step {self._hopeless_steps} of such")
        return results, faults

    def _attempt(
        self, rows: list[Row], faults: list[Fault], *, last: bool = False
    ) -> list[tuple[Row, Sampled]]:
        try:
            return self._forward(rows)
        except Exception as problem:  # noqa: BLE001 - looks for the row at fault
            if _is_fatal(problem):
                raise
            starved = _is_out_of_memory(problem)
            self._log.warning("step failed", rows=len(rows), starved=starved, reason=brief(problem))
            if len(rows) == 1 and not starved:
                faults.append(fault(rows[0].sequence, problem, self._log))
                return []
        # Out of the handler, or its traceback would keep the failed step's tensors alive.
        if starved:
            _free_memory()
            self._scheduler.shrink()
        if len(rows) > 1:
            half = len(rows) // 2
            return self._attempt(rows[:half], faults) + self._attempt(rows[half:], faults)
        row = rows[0]
        if row.tokens > 1:
            return self._attempt([Row(row.sequence, row.tokens // 2, samples=False)], faults)
        if not last:
            return self._attempt(rows, faults, last=True)  # now that memory was freed
        refusal = OutOfMemory("The device has no memory left for this request.")
        faults.append(Fault(row.sequence, refusal, explained=True))
        return []

    @torch.inference_mode()
    def _forward(self, rows: list[Row]) -> list[tuple[Row, Sampled]]:
        wishes = [number for number, row in enumerate(rows) if row.sequence.wants_prompt_logits]
        if wishes:
            logits, prompts = self._runner.forward_with_prompts(rows, wishes)
            for number in wishes:
                self._note_prompt(rows[number], prompts[number])
        else:
            logits = self._runner.forward(rows)
        sampling = [row for row in rows if row.samples]
        sampled = self._sampler.sample(logits, [row.sequence for row in sampling]) if sampling else []
        for row in rows:
            self._scheduler.computed(row)
        self._scheduler.went_well()
        return list(zip(sampling, sampled, strict=True))

    def _note_prompt(self, row: Row, logits: torch.Tensor) -> None:
        """Collect the log-probabilities of the prompt tokens that follow the row's."""
        sequence, first = row.sequence, row.sequence.computed + 1
        rivals = sequence.params.prompt_logprobs
        assert rivals is not None, f"{sequence.id} wants no log-probabilities of its prompt"
        next_ids = sequence.token_ids[first : min(first + row.tokens, sequence.prompt_tokens)]
        known = (sequence.prompt_logprobs or [None])[:first]  # after preemption: from the beginning again
        sequence.prompt_logprobs = known + logprobs.of_prompt(self._texts, logits, next_ids, rivals)


def _pieces(rows: Items[Row], budget: int) -> list[list[Row]]:
    """Rows in groups of at most `budget` tokens. One group, unless the budget was cut for want of memory."""
    pieces: list[list[Row]] = []
    left = 0
    for row in rows:
        if not pieces or row.tokens > left:
            pieces.append([])
            left = budget
        pieces[-1].append(row)
        left -= row.tokens
    return pieces


def _is_out_of_memory(problem: Exception) -> bool:
    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return True
    # torch's CPU allocator has no exception of its own.
    return isinstance(problem, RuntimeError) and "can't allocate memory" in str(problem)


def _is_fatal(problem: Exception) -> bool:
    """A CUDA context doesn't survive these: device asserts, illegal addresses, a lost device."""
    return isinstance(problem, torch.AcceleratorError) or "CUDA error" in str(problem)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
