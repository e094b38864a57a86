"""The thread that owns the model: receive → schedule → run → postprocess → emit.

Does no network I/O: commands come in through `Engine.inbox`, output goes out through `emit`. A fault stays
with the request that caused it; what can't be pinned on one ends the thread, and `EngineDied` says so.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence as Items
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from broker.errors import InternalError, InvalidRequest, LoadOnceError
from broker.logs import Log
from broker.protocol import MAX_FRAME_BYTES, Chunk, encode

from . import logprobs
from .exchange import Command, Counters, Emit, EngineDied, Quit, Run, StepOutput, Stop
from .faults import FaultFinder, brief, fault, unforeseen
from .intake import Answer, Intake, outcome
from .pages import Pages
from .sampler import Sampled, Sampler
from .scheduler import Scheduler
from .sequence import Ending, Sequence
from .settings import WorkerSettings

if TYPE_CHECKING:
    from .loading import LoadedModel
    from .runner import Runner

#: While streams run, new requests are taken in for so long before the next step.
_INTAKE_S: Final = 0.02
#: After so long without work the accounts are checked, once.
_IDLE_CHECK_S: Final = 1.0


class Engine:
    """Continuous batching over one model.

    Args:
        loaded: the model.
        settings: `slots`, `step_tokens`, `prefix_cache`, `log_prompts`.
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
        self._emit = emit
        self._log = log
        self._log_prompts = settings.log_prompts
        self._intake = Intake(loaded, self.context)
        self._texts = logprobs.TokenTexts(loaded.tokenizer)
        pages = Pages(runner.pages_total, runner.page_tokens, prefix_cache=settings.prefix_cache)
        budget = settings.tokens_per_step(loaded.device.type)
        self._scheduler = Scheduler(pages, slots=settings.slots, step_tokens=budget)
        sampler = sampler or Sampler(loaded.device, loaded.vocab)
        self._fault_finder = FaultFinder(runner, sampler, self._scheduler, self._texts, log)
        self._in_hand: dict[str, Sequence] = {}
        self._output = StepOutput()

    def run(self) -> None:
        """Serve until `Quit`. If it can't go on: hands back what it has, says `EngineDied`, returns."""
        # The model's objects stay: without this, a full collection would stop all streams to look at them.
        gc.collect()
        gc.freeze()
        self._warm_up()
        try:
            while self._receive():
                self.step()
        except Exception as problem:  # noqa: BLE001 - the thread's boundary
            self._die(problem)

    def step(self) -> None:
        """One step over what is in hand; also says what `_receive` had to say."""
        self.counters.running = len(self._scheduler)
        step = self._scheduler.schedule()
        self.counters.in_step = tuple(row.sequence.id for row in step.rows)
        if step.rows:
            results, faults = self._fault_finder.run(step.rows)
            for found in faults:
                self._fail(found.sequence, found.problem)
            for row, sampled in results:
                self._postprocess(row.sequence, sampled)
            self._count(step.begun, step.preempted)
        self.counters.in_step = ()
        self._tell()

    def _warm_up(self) -> None:
        """Have the first grammar's cost paid before anybody streams."""
        try:
            self._intake.warm_up()
        except Exception as problem:  # noqa: BLE001 - requests with a grammar will fail, the others won't
            self._log.warning("grammars can't be used with this tokenizer", reason=brief(problem))

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
                        if id in self._in_hand:
                            self._note(self._in_hand[id], "cancelled")
                        self._forget(id)
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
            if isinstance(accepted, Answer):
                self._answer(command.id, accepted)
            else:
                self._in_hand[command.id] = accepted
                self._scheduler.add(accepted)
        except LoadOnceError as problem:
            self._output.failed.append((command.id, problem))
        except Exception as problem:  # noqa: BLE001 - one request's fault must not be the others'
            self._output.failed.append((command.id, unforeseen(command.request_id, problem, self._log)))

    def _answer(self, id: str, answer: Answer) -> None:
        if answer.chunk is not None:
            self._say(id, answer.chunk)
        self._output.finished.append((id, encode(answer.outcome)))

    def _say(self, id: str, chunk: Chunk) -> None:
        """Put a chunk into the step's output.

        Raises:
            InvalidRequest: it is too long for a frame; ZeroMQ would cut the worker off for it.
        """
        frame = encode(chunk)
        if len(frame) > MAX_FRAME_BYTES:
            what = "prompt" if chunk.prompt_logprobs is None else "prompt_logprobs"
            raise InvalidRequest(
                f"{what}: the answer would have a piece of {len(frame)} bytes, at most {MAX_FRAME_BYTES}"
                " can be sent",
                param=what,
            )
        self._output.chunks.append((id, frame, len(chunk.token_ids)))

    def _forget(self, id: str) -> None:
        sequence = self._in_hand.pop(id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def _note(self, sequence: Sequence, ended: str) -> None:
        """One line for each request that was in hand: what it was, how it ended, how long it was here."""
        fields: dict[str, object] = {
            "request_id": sequence.request_id,
            "ended": ended,
            "prompt_tokens": sequence.prompt_tokens,
            "cached_tokens": sequence.cached_tokens or 0,
            "output_tokens": sequence.output_tokens,
            "seconds": round(time.monotonic() - sequence.arrived, 3),
        }
        if sequence.traceparent:
            fields["traceparent"] = sequence.traceparent
        if self._log_prompts:
            fields["prompt"], fields["output"] = self._intake.shown(sequence)
        self._log.info("request", **fields)

    # ── postprocess ──────────────────────────────────────────────────────────────────────────────

    def _postprocess(self, sequence: Sequence, sampled: Sampled) -> None:
        if sampled.error is not None:
            self._fail(sequence, InternalError(sampled.error), tainted=True)
            return
        try:
            self._take(sequence, sampled)
        except Exception as problem:  # noqa: BLE001 - one request's fault must not be the others'
            self._fail(sequence, fault(sequence, problem, self._log).problem)

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
        self._say(sequence.id, chunk)
        if ending is not None:
            self._output.finished.append((sequence.id, encode(outcome(sequence, ending))))
            self._note(sequence, ending.reason)
            self._forget(sequence.id)

    def _fail(self, sequence: Sequence, problem: LoadOnceError, *, tainted: bool = False) -> None:
        self._output.failed.append((sequence.id, problem))
        self._note(sequence, problem.code)
        del self._in_hand[sequence.id]
        self._scheduler.remove(sequence, tainted=tainted)

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
        self._log.error("engine died", exc=problem, suspects=len(self.counters.in_step))
        suspects = tuple(id for id in self.counters.in_step if id in self._in_hand)
        self._output.handed_back += [id for id in self._in_hand if id not in suspects]
        self._in_hand.clear()
        while (command := self._next()) is not None:
            if isinstance(command, Run):
                self._output.handed_back.append(command.id)
        if self._output:
            self._emit(self._output)
        self._emit(EngineDied(brief(problem), suspects))
