"""The worker's side of the protocol, without a socket: register, beat, take work, hand back, start over.

Events and the time go in; messages to the broker (`take`) and commands to the engine (`commands`) come out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import msgspec

from broker import protocol as p
from broker.logs import Log

from .exchange import Command, Counters, EngineDied, Output, Quit, Run, StepOutput, Stop

REGISTER_S: Final = 2.0  # between attempts to register while nobody answers
REFUSED_PATIENCE_S: Final = 20.0  # how long a refusal may be a predecessor that isn't gone yet
_FINAL_REFUSALS: Final = frozenset({"protocol_version", "protocol_error"})


class State(enum.Enum):
    """Where the worker is with its broker."""

    REGISTERING = "registering"  # ready was said, no beat of the broker has come
    SERVING = "serving"
    DRAINING = "draining"  # no new work
    ENDED = "ended"


class End(enum.Enum):
    """Why a session is over; `__main__` has an exit code for each."""

    DRAINED = "drained"
    REFUSED = "refused"
    ENGINE_DIED = "engine died"
    STALLED = "stalled"


class Session:
    """One worker's conversation with whatever broker is there.

    Args:
        ready: what to register with.
        counters: the engine's, for beats.
        log: for what an operator wants to know.
        now: monotonic seconds, as in all methods.
    """

    def __init__(self, ready: p.Ready, counters: Counters, log: Log, now: float) -> None:
        self.state = State.REGISTERING
        self.end: End | None = None
        self.in_hand: set[str] = set()
        self._ready = ready
        self._counters = counters
        self._log = log
        self._session = ""
        self._registered_at = float("-inf")
        self._refused_since: float | None = None
        self._beat_at = now
        self._leave_at = float("inf")
        self._out: list[list[bytes]] = []
        self._commands: list[Command] = []
        self._register(now)

    def take(self) -> list[list[bytes]]:
        """Messages to send, in order; the caller owns them now."""
        out, self._out = self._out, []
        return out

    def commands(self) -> list[Command]:
        """Commands for the engine, in order; the caller owns them now."""
        commands, self._commands = self._commands, []
        return commands

    # ── from the broker ──────────────────────────────────────────────────────────────────────────

    def on_message(self, message: p.BrokerToWorker, body: Sequence[bytes], now: float) -> None:
        """A decoded message of the broker."""
        match message:
            case p.Work():
                self._on_work(message, body)
            case p.CancelWork():
                self._forget(message.ids)
            case p.BrokerBeat():
                self._on_beat(message, now)
            case p.Drain():
                self.drain(message.grace_ms / 1000, now)
            case p.Failed():
                self._on_refusal(message, now)

    def _on_work(self, work: p.Work, body: Sequence[bytes]) -> None:
        if self.state is not State.SERVING or not body:
            self._say(p.HandOff(ids=[work.id]))
            return
        self.in_hand.add(work.id)
        self._commands.append(Run(work.id, work.request_id, body[0], tuple(body[1:])))

    def _on_beat(self, beat: p.BrokerBeat, now: float) -> None:
        if self._session and beat.session != self._session:
            self._log.warning("new broker", dropped=len(self.in_hand))
            self._forget(list(self.in_hand))
            self._session = beat.session
            if self.state is State.SERVING:
                self.state = State.REGISTERING
                self._register(now)
                return
        self._session = beat.session
        if self.state is State.REGISTERING:
            self.state = State.SERVING
            self._refused_since = None
            self._log.info("registered", worker=self._ready.name, session=beat.session)

    def _on_refusal(self, refusal: p.Failed, now: float) -> None:
        """The broker doesn't know us (any more), or doesn't want us (yet)."""
        if self.state in (State.DRAINING, State.ENDED):
            return
        self._forget(list(self.in_hand))
        self.state = State.REGISTERING
        if refusal.code == "not_found":
            self._register(now)
            return
        if self._refused_since is None:
            self._refused_since = now
            self._log.warning("refused", reason=refusal.message)
        patience_over = now - self._refused_since >= REFUSED_PATIENCE_S
        if refusal.code in _FINAL_REFUSALS or patience_over:
            self._log.error("refused for good", reason=refusal.message)
            self._finish(End.REFUSED)

    # ── from the engine ──────────────────────────────────────────────────────────────────────────

    def on_output(self, output: Output, now: float) -> None:
        """What the engine says; output of requests that are no longer in hand is dropped."""
        if isinstance(output, EngineDied):
            self._on_engine_died(output)
            return
        self._send_chunks(output)
        for id, frame in output.finished:
            if id in self.in_hand:
                self.in_hand.discard(id)
                self._say(p.Done(id=id), [frame])
        for id, problem in output.failed:
            if id in self.in_hand:
                self.in_hand.discard(id)
                self._say(p.Failed.of(problem, id))
        self._hand_back(output.handed_back)
        if self.state is State.DRAINING and not self.in_hand:
            self._leave()

    def _send_chunks(self, output: StepOutput) -> None:
        mine = [chunk for chunk in output.chunks if chunk[0] in self.in_hand]
        if mine:
            ids, frames, tokens = zip(*mine, strict=True)
            self._say(p.Chunks(ids=list(ids), tokens=list(tokens)), frames)

    def _on_engine_died(self, died: EngineDied) -> None:
        """Give back what isn't to blame; the suspects end with the process, so that the broker counts it."""
        self._log.error("engine died", reason=died.reason, suspects=len(died.suspects))
        self._hand_back(self.in_hand - set(died.suspects))
        self._finish(End.ENGINE_DIED)

    # ── from the process ─────────────────────────────────────────────────────────────────────────

    def drain(self, grace_s: float, now: float) -> None:
        """Take no new work, finish within the grace, hand back the rest. A second call only shortens it."""
        self._leave_at = min(self._leave_at, now + grace_s)
        if self.state in (State.DRAINING, State.ENDED):
            return
        self._log.info("draining", in_hand=len(self.in_hand), grace_s=grace_s)
        self.state = State.DRAINING
        self._say(p.HandOff(ids=[]))  # so that the broker sends nothing more
        if not self.in_hand:
            self._leave()

    def stalled(self) -> None:
        """A step never returned, so the process has to go: gives back what isn't in that step.

        What is in it ends with the process, so that the broker counts it and a poison pill meets its limit.
        """
        suspects = self.in_hand.intersection(self._counters.in_step)
        self._log.error("step hung", in_hand=len(self.in_hand), suspects=len(suspects))
        self._hand_back(self.in_hand - suspects)
        self._finish(End.STALLED)

    def tick(self, now: float) -> None:
        """Let time pass: beats, registration, the end of a grace. Due at least each second."""
        if self.state is State.DRAINING and now >= self._leave_at:
            self._hand_back(self.in_hand)
            self._leave()
        if self.state is State.REGISTERING and now - self._registered_at >= REGISTER_S:
            self._register(now)
        if self.state in (State.SERVING, State.DRAINING) and now - self._beat_at >= p.BEAT_INTERVAL_S:
            self._beat_at = now
            self._say(self._beat())

    def _beat(self) -> p.WorkerBeat:
        c = self._counters
        return p.WorkerBeat(
            session=self._session, running=len(self.in_hand), steps=c.steps,
            kv_pages_used=c.kv_pages_used, kv_pages_total=c.kv_pages_total, prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens, generated_tokens=c.generated_tokens, preemptions=c.preemptions,
        )  # fmt: skip

    # ── within ───────────────────────────────────────────────────────────────────────────────────

    def _register(self, now: float) -> None:
        self._registered_at = now
        self._say(msgspec.structs.replace(self._ready, session=self._session))

    def _forget(self, ids: Sequence[str]) -> None:
        """Stop requests that nobody waits for any more."""
        self.in_hand.difference_update(ids)
        if ids:
            self._commands.append(Stop(tuple(ids)))
        if self.state is State.DRAINING and not self.in_hand:
            self._leave()

    def _hand_back(self, ids: Sequence[str] | set[str]) -> None:
        mine = [id for id in ids if id in self.in_hand]
        for first in range(0, len(mine), p.MAX_IDS):
            self._say(p.HandOff(ids=mine[first : first + p.MAX_IDS]))
        self.in_hand.difference_update(mine)

    def _leave(self) -> None:
        self._say(p.Leave())
        self._finish(End.DRAINED)

    def _finish(self, end: End) -> None:
        if self.end is None:
            self.end = end
            self.state = State.ENDED
            self._commands.append(Quit())

    def _say(self, message: p.WorkerMessage, body: Sequence[bytes] = ()) -> None:
        self._out.append([p.encode(message), *body])
