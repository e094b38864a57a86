"""The worker's side of the protocol: registers until it is heard, hands back what it can't finish."""

from __future__ import annotations

import io

from broker import protocol as p
from broker.errors import InternalError, NotFound, Unavailable, VersionMismatch
from broker.logs import Log
from gpu_worker.exchange import Counters, EngineDied, Quit, Run, StepOutput, Stop
from gpu_worker.session import REFUSED_PATIENCE_S, REGISTER_S, End, Session, State

READY = p.Ready(
    name="gpu0", device="cpu", host="here", pid=1, slots=2,
    models=[p.ModelInfo(name="m", context=10, vocab=10)],
)  # fmt: skip


class Stage:
    """A session with a clock, and what it says in decoded form."""

    def __init__(self) -> None:
        self.now = 100.0
        self.counters = Counters()
        self.session = Session(READY, self.counters, Log("test", stream=io.StringIO()), self.now)

    def said(self) -> list[p.WorkerMessage]:
        return [p.decode_header(p.from_worker, frames[0]) for frames in self.session.take()]

    def hear(self, message: p.BrokerToWorker, *body: bytes) -> None:
        self.session.on_message(message, body, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.session.tick(self.now)

    def output(self, **parts: list[object]) -> None:
        self.session.on_output(StepOutput(**parts), self.now)  # type: ignore[arg-type]


def serving() -> Stage:
    stage = Stage()
    stage.hear(p.BrokerBeat(session="s1"))
    stage.said()
    return stage


def working(*ids: str) -> Stage:
    stage = serving()
    for id in ids:
        stage.hear(p.Work(id=id, request_id=f"r{id}"), b"request", b"chunk")
    return stage


def test_it_registers_at_once_and_again_until_a_broker_answers() -> None:
    stage = Stage()
    assert stage.said() == [READY]
    stage.wait(REGISTER_S)
    assert stage.said() == [READY]
    stage.hear(p.BrokerBeat(session="s1"))
    assert stage.session.state is State.SERVING
    stage.wait(REGISTER_S)
    assert not any(isinstance(m, p.Ready) for m in stage.said())


def test_work_goes_to_the_engine_with_the_chunks_delivered() -> None:
    stage = working("1.1")
    assert stage.session.commands() == [Run("1.1", "r1.1", b"request", (b"chunk",))]


def test_work_that_comes_before_registration_or_without_a_request_is_handed_back() -> None:
    stage = Stage()
    stage.said()
    stage.hear(p.Work(id="1.1", request_id="r"), b"request")
    assert stage.said() == [p.HandOff(ids=["1.1"])]
    stage = serving()
    stage.hear(p.Work(id="1.1", request_id="r"))
    assert stage.said() == [p.HandOff(ids=["1.1"])]


def test_a_step_is_one_chunk_message_before_the_ends() -> None:
    stage = working("a", "b")
    stage.output(
        chunks=[("a", b"x", 1), ("gone", b"z", 1), ("b", b"y", 2)],
        finished=[("a", b"outcome")],
        failed=[("b", InternalError("why"))],
    )
    frames = stage.session.take()
    assert [p.decode_header(p.from_worker, f[0]) for f in frames] == [
        p.Chunks(ids=["a", "b"], tokens=[1, 2]),
        p.Done(id="a"),
        p.Failed(code="internal_error", message="why", id="b"),
    ]
    assert frames[0][1:] == [b"x", b"y"] and frames[1][1:] == [b"outcome"]
    assert stage.session.in_hand == set()


def test_cancelled_work_is_stopped_and_its_late_output_dropped() -> None:
    stage = working("a")
    stage.session.commands()
    stage.hear(p.CancelWork(ids=["a"]))
    assert stage.session.commands() == [Stop(("a",))]
    stage.output(chunks=[("a", b"x", 1)], finished=[("a", b"outcome")])
    assert stage.said() == []


def test_it_beats_each_second_with_the_engines_counters() -> None:
    stage = working("a")
    stage.counters.steps = 7
    stage.wait(p.BEAT_INTERVAL_S)
    (beat,) = stage.said()
    assert isinstance(beat, p.WorkerBeat)
    assert (beat.session, beat.running, beat.steps) == ("s1", 1, 7)


def test_c67_a_new_broker_means_dropping_all_work_and_registering_again() -> None:
    stage = working("a")
    stage.session.commands()
    stage.hear(p.BrokerBeat(session="s2"))
    assert stage.session.commands() == [Stop(("a",))]
    (ready,) = stage.said()
    assert isinstance(ready, p.Ready) and ready.session == "s2"
    stage.hear(p.BrokerBeat(session="s2"))
    assert stage.session.state is State.SERVING


def test_a_broker_that_took_it_for_dead_makes_it_start_over() -> None:
    stage = working("a")
    stage.session.commands()
    stage.hear(p.Failed.of(NotFound("send ready again")))
    assert stage.session.commands() == [Stop(("a",))]
    assert isinstance(stage.said()[0], p.Ready)
    assert stage.session.end is None


def test_c63_a_taken_name_is_tried_again_for_a_while_and_then_given_up() -> None:
    stage = Stage()
    stage.said()
    taken = p.Failed.of(Unavailable("name: taken"))
    stage.hear(taken)
    stage.wait(REGISTER_S)
    assert isinstance(stage.said()[0], p.Ready)
    stage.wait(REFUSED_PATIENCE_S)
    stage.hear(taken)
    assert stage.session.end is End.REFUSED
    assert stage.session.commands()[-1] == Quit()


def test_another_version_is_given_up_at_once() -> None:
    stage = Stage()
    stage.hear(p.Failed.of(VersionMismatch("version")))
    assert stage.session.end is End.REFUSED


def test_an_idle_worker_drains_at_once() -> None:
    stage = serving()
    stage.session.drain(20, stage.now)
    assert stage.said() == [p.HandOff(ids=[]), p.Leave()]
    assert stage.session.end is End.DRAINED


def test_c90_a_draining_worker_takes_nothing_new_and_finishes_what_it_has() -> None:
    stage = working("a")
    stage.session.drain(20, stage.now)
    stage.hear(p.Work(id="b", request_id="r"), b"request")
    assert stage.said() == [p.HandOff(ids=[]), p.HandOff(ids=["b"])]
    stage.wait(5)
    stage.output(finished=[("a", b"outcome")])
    assert stage.said()[-2:] == [p.Done(id="a"), p.Leave()]
    assert stage.session.end is End.DRAINED


def test_at_the_end_of_the_grace_the_rest_is_handed_back() -> None:
    stage = working("a", "b")
    stage.session.drain(20, stage.now)
    stage.said()
    stage.wait(20)
    handed, left = [m for m in stage.said() if not isinstance(m, p.WorkerBeat)]
    assert isinstance(handed, p.HandOff) and set(handed.ids) == {"a", "b"}
    assert isinstance(left, p.Leave)


def test_a_second_signal_shortens_the_grace() -> None:
    stage = working("a")
    stage.session.drain(20, stage.now)
    stage.session.drain(0, stage.now)
    stage.wait(0)
    assert stage.session.end is End.DRAINED


def test_the_broker_may_ask_for_the_drain() -> None:
    stage = working("a")
    stage.hear(p.Drain(grace_ms=0))
    stage.wait(0)
    assert stage.session.end is End.DRAINED


def test_a_dead_engines_requests_go_back_but_for_the_suspects() -> None:
    stage = working("a", "b")
    stage.said()
    stage.session.on_output(EngineDied("device assert", ("b",)), stage.now)
    assert stage.said() == [p.HandOff(ids=["a"])]
    assert stage.session.end is End.ENGINE_DIED
    assert stage.session.in_hand == {"b"}, "it ends with the process, so that the broker counts it"


def test_a_hung_step_gives_back_what_is_not_in_it() -> None:
    stage = working("a", "b")
    stage.said()
    stage.counters.in_step = ("b", "cancelled")
    stage.session.stalled()
    assert stage.said() == [p.HandOff(ids=["a"])]
    assert stage.session.end is End.STALLED
    assert stage.session.in_hand == {"b"}, "it ends with the process, so that the broker counts it"
