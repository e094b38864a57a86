"""The thread that owns the model: receive → schedule → run → postprocess → emit.

Does no network I/O: commands come in through `Engine.inbox`, output goes out through `emit`. A fault stays
with the request that caused it; what can't be pinned on one ends the thread, and `EngineDied` says so.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import torch

from broker.errors import InternalError, LoadOnceError, OutOfMemory
from broker.logs import Log
from broker.protocol import Chunk, encode

from . import logprobs
from .exchange import Command, Counters, Emit, EngineDied, HandBack, Quit, Run, StepOutput, Stop
from .intake import Answer, Intake, outcome
from .pages import Pages
from .sampler import Sampled, Sampler
from .scheduler import Row, Scheduler
from .sequence import Ending, Sequence
from .settings import WorkerSettings

if TYPE_CHECKING:
    from .loading import LoadedModel
    from .runner import Runner

#: While streams run, new requests are taken in for so long before the next step.
_INTAKE_S: Final = 0.02
#: After so long without work the accounts are checked, once.
_IDLE_CHECK_S: Final = 1.0
#: So many steps in a row in which every row fails mean that it isn't the requests.
_HOPELESS_STEPS: Final = 3


class EngineBroken(Exception):  # noqa: N818 - what it means is in its sentence
    """No request is to blame, and going on is no use."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a row could not be computed; unexplained is what nobody had foreseen."""

    sequence: Sequence
    problem: LoadOnceError
    explained: bool = True


class Engine:
    """Continuous batching over one model.

    Args:
        loaded: the model.
        settings: `slots`, `step_tokens`, `prefix_cache`.
        runner: computes rows.
        emit: gets each step's output, in the engine's thread, and must not block.
        log: gets what an operator should know.
        sampler: draws tokens; by default the real one.

    Attributes:
        inbox: commands, from any thread.
        counters: for beats; written here, read anywhere.
        context: longest prompt + output that is accepted, in tokens.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: WorkerSettings,
        runner: Runner,
        emit: Emit,
        log: Log,
        *,
        sampler: Sampler | None = None,
    ) -> None:
        self.inbox: SimpleQueue[Command] = SimpleQueue()
        self.counters = Counters(kv_pages_total=runner.pages_total)
        self.context = min(loaded.context, runner.pages_total * runner.page_tokens)
        self._runner = runner
        self._sampler = sampler or Sampler(loaded.device, loaded.vocab)
        self._emit = emit
        self._log = log
        self._intake = Intake(loaded, self.context)
        self._texts = logprobs.TokenTexts(loaded.tokenizer)
        pages = Pages(runner.pages_total, runner.page_tokens, prefix_cache=settings.prefix_cache)
        self._scheduler = Scheduler(pages, slots=settings.slots, step_tokens=settings.step_tokens)
        self._in_hand: dict[str, Sequence] = {}
        self._output = StepOutput()
        self._in_step: tuple[str, ...] = ()  # to blame if the step is the last one
        self._hopeless_steps = 0

    def run(self) -> None:
        """Serve until `Quit`. If it can't go on: hands back what it has, says `EngineDied`, returns."""
        # The model's objects stay: without this, a full collection would stop all streams to look at them.
        gc.collect()
        gc.freeze()
        try:
            while self._receive():
                self.step()
        except Exception as problem:  # noqa: BLE001 - the thread's boundary
            self._die(problem)

    def step(self) -> None:
        """One step over what is in hand; also says what `_receive` had to say."""
        self.counters.running = len(self._scheduler)
        step = self._scheduler.schedule()
        self._in_step = tuple(row.sequence.id for row in step.rows)
        if step.rows:
            for row, sampled in self._compute(step.rows):
                self._postprocess(row.sequence, sampled)
            self._count(step.begun, step.preempted)
        self._in_step = ()
        self._tell()

    # ── receive ──────────────────────────────────────────────────────────────────────────────────

    def _receive(self) -> bool:
        """Take commands, waiting for the first if there is nothing to do. False: leave."""
        command = self._wait() if not len(self._scheduler) else self._next()
        until = time.monotonic() + _INTAKE_S
        while command is not None:
            match command:
                case Run():
                    self._start(command)
                case Stop(ids):
                    for id in ids:
                        self._forget(id)
                case HandBack():
                    self._hand_back(self._in_hand)
                case Quit():
                    return False
            command = self._next() if time.monotonic() < until else None
        return True

    def _next(self) -> Command | None:
        try:
            return self.inbox.get_nowait()
        except Empty:
            return None

    def _wait(self) -> Command:
        try:
            return self.inbox.get(timeout=_IDLE_CHECK_S)
        except Empty:
            self._scheduler.check()
            return self.inbox.get()

    def _start(self, command: Run) -> None:
        self._forget(command.id)
        try:
            accepted = self._intake.accept(command)
        except LoadOnceError as problem:
            self._output.failed.append((command.id, problem))
        except Exception as problem:  # noqa: BLE001 - one request's fault must not be the others'
            self._output.failed.append((command.id, self._unexpected(command.request_id, problem)))
        else:
            if isinstance(accepted, Answer):
                self._answer(command.id, accepted)
            else:
                self._in_hand[command.id] = accepted
                self._scheduler.add(accepted)

    def _answer(self, id: str, answer: Answer) -> None:
        if answer.chunk is not None:
            self._output.chunks.append((id, encode(answer.chunk), len(answer.chunk.token_ids)))
        self._output.finished.append((id, encode(answer.outcome)))

    def _forget(self, id: str) -> None:
        sequence = self._in_hand.pop(id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def _hand_back(self, ids: Items[str] | dict[str, Sequence]) -> None:
        for id in list(ids):
            self._forget(id)
            self._output.handed_back.append(id)

    # ── run ──────────────────────────────────────────────────────────────────────────────────────

    def _compute(self, rows: list[Row]) -> list[tuple[Row, Sampled]]:
        """Run the model and the sampler over the rows, in pieces if memory is short.

        A row whose own fault stops it has failed and is not in the result; nor is one that samples nothing.

        Raises:
            EngineBroken: every row fails, again and again or all at once.
        """
        faults: list[_Fault] = []
        results: list[tuple[Row, Sampled]] = []
        for piece in _pieces(rows, self._scheduler.budget):
            results += self._attempt(piece, faults)
        hopeless = sum(not fault.explained for fault in faults) == len(rows)
        self._hopeless_steps = self._hopeless_steps + 1 if hopeless else 0
        if hopeless and (len(rows) > 1 or self._hopeless_steps >= _HOPELESS_STEPS):
            raise EngineBroken(f"all of {len(rows)} rows fail, step {self._hopeless_steps} of such")
        for fault in faults:
            self._fail(fault.sequence, fault.problem)
        return results

    def _attempt(
        self, rows: list[Row], faults: list[_Fault], *, last: bool = False
    ) -> list[tuple[Row, Sampled]]:
        """Compute rows; if that fails, halves of them, until the guilty row is alone.

        Computing a row again writes the same keys and values to the same places, so trying again is safe.
        """
        try:
            return self._forward(rows)
        except Exception as problem:  # noqa: BLE001 - looks for the row at fault
            if _is_fatal(problem):
                raise
            starved = _is_out_of_memory(problem)
            self._log.warning("step failed", rows=len(rows), starved=starved, reason=_brief(problem))
            if len(rows) == 1 and not starved:
                faults.append(self._fault(rows[0].sequence, problem))
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
        faults.append(_Fault(row.sequence, OutOfMemory("The device has no memory left for this request.")))
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

    # ── postprocess ──────────────────────────────────────────────────────────────────────────────

    def _postprocess(self, sequence: Sequence, sampled: Sampled) -> None:
        if sampled.error is not None:
            self._fail(sequence, InternalError(sampled.error), tainted=True)
            return
        try:
            self._take(sequence, sampled)
        except Exception as problem:  # noqa: BLE001 - one request's fault must not be the others'
            self._fail(sequence, self._fault(sequence, problem).problem)

    def _take(self, sequence: Sequence, sampled: Sampled) -> None:
        """The drawn token becomes a chunk, and maybe the end."""
        chunk = Chunk(start=sequence.output_tokens)
        if not sequence.params.max_tokens:
            ending: Ending | None = Ending("length")  # it was run for its prompt alone
        else:
            ending = sequence.accept(sampled.token_id)
            chunk.token_ids = [sampled.token_id]
            chunk.text = sequence.take_unsent()
            self.counters.generated_tokens += 1
            if sequence.params.logprobs is not None:
                chunk.logprobs = [
                    logprobs.report(self._texts, sampled.token_id, sampled.logprob or 0.0, sampled.top)
                ]
        if not sequence.opened:
            self._intake.opening(sequence, chunk)
        self._output.chunks.append((sequence.id, encode(chunk), len(chunk.token_ids)))
        if ending is not None:
            self._output.finished.append((sequence.id, encode(outcome(sequence, ending))))
            self._forget(sequence.id)

    def _fail(self, sequence: Sequence, problem: LoadOnceError, *, tainted: bool = False) -> None:
        self._output.failed.append((sequence.id, problem))
        del self._in_hand[sequence.id]
        self._scheduler.remove(sequence, tainted=tainted)

    def _fault(self, sequence: Sequence, problem: Exception) -> _Fault:
        if isinstance(problem, LoadOnceError):
            return _Fault(sequence, problem)
        return _Fault(sequence, self._unexpected(sequence.request_id, problem), explained=False)

    def _unexpected(self, request_id: str, problem: Exception) -> InternalError:
        self._log.error("request failed", exc=problem, id=request_id)
        return InternalError("The worker failed on this request.")

    # ── emit ─────────────────────────────────────────────────────────────────────────────────────

    def _tell(self) -> None:
        self.counters.running = len(self._scheduler)
        self.counters.kv_pages_used = self._scheduler.pages.used
        if self._output:
            output, self._output = self._output, StepOutput()
            self._emit(output)

    def _count(self, begun: Items[Sequence], preempted: int) -> None:
        counters = self.counters
        counters.steps += 1
        counters.preemptions += preempted
        for sequence in begun:
            counters.prompt_tokens += sequence.prompt_tokens
            counters.cached_tokens += sequence.cached_tokens or 0

    def _die(self, problem: Exception) -> None:
        """Give back what is not to blame; the rest ends with the process, as the broker counts attempts."""
        self._log.error("engine died", exc=problem, suspects=len(self._in_step))
        suspects = tuple(id for id in self._in_step if id in self._in_hand)
        self._output.handed_back += [id for id in self._in_hand if id not in suspects]
        self._in_hand.clear()
        if self._output:
            self._emit(self._output)
        self._emit(EngineDied(_brief(problem), suspects))


def _pieces(rows: list[Row], budget: int) -> list[list[Row]]:
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


def _brief(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".split("\n", 1)[0][:300]
