"""The client's side, without a socket: whatever is lost, a call's story is told once and whole."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import protocol as p
from broker.calls import (
    INCOMPLETE_AT_MOST,
    Calls,
    encode_request,
    estimate_cost,
    make_submit,
    prefix_hashes,
    text_bytes,
)
from broker.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LoadOnceError,
    Overloaded,
)

WORDS = [f"w{i} " for i in range(12)]


@dataclass
class Heard:
    """A listener that remembers."""

    chunks: list[p.Chunk] = field(default_factory=list)
    ends: list[object] = field(default_factory=list)

    def on_chunk(self, chunk: p.Chunk) -> None:
        assert not self.ends, "a chunk after the end"
        self.chunks.append(chunk)

    def on_done(self, done: p.Done, outcome: p.Outcome) -> None:
        self.ends.append(outcome)

    def on_failed(self, problem: LoadOnceError) -> None:
        self.ends.append(problem)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


class Stage:
    """Calls with a clock, one call begun."""

    def __init__(self, *, stream: bool = True, timeout_s: float = 60.0) -> None:
        self.now = 10.0
        self.calls = Calls(self.now)
        self.heard = Heard()
        request = p.Request(prompt="go", params=p.Params(seed=1))
        self.calls.submit(p.Submit(id="a", stream=stream), request, self.heard, self.now, timeout_s)

    def said(self) -> list[tuple[p.ClientMessage, list[p.Chunk]]]:
        """Messages sent, with the chunks that came along."""
        return [
            (p.decode_header(p.from_client, frames[0]), [p.chunk_body.decode(f) for f in frames[2:]])
            for frames in self.calls.take()
        ]

    def hear(self, message: p.BrokerToClient, *bodies: p.Chunk | p.Outcome) -> None:
        self.calls.on_message([p.encode(message), *map(p.encode, bodies)], self.now)

    def hear_words(self, *numbers: int) -> None:
        for number in numbers:
            self.hear(p.Chunks(ids=["a"]), p.Chunk(number, [number], WORDS[number]))

    def hear_done(self, tokens: int) -> None:
        self.hear(p.Done(id="a"), p.Outcome("stop", p.Usage(1, tokens)))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.calls.tick(self.now)


def test_a_stream_is_heard_in_order_and_ends_once() -> None:
    stage = Stage()
    stage.hear_words(0, 1, 2)
    stage.hear_done(3)
    stage.hear_done(3)
    assert stage.heard.text == "w0 w1 w2 "
    assert len(stage.heard.ends) == 1 and stage.calls.pending == 0


def test_a_repeated_chunk_is_dropped() -> None:
    stage = Stage()
    stage.hear_words(0, 1, 0, 1, 2)
    assert stage.heard.text == "w0 w1 w2 "


def test_a_gap_makes_it_start_over_from_what_it_has_once_a_second() -> None:
    stage = Stage()
    stage.said()
    stage.hear_words(0, 1)
    stage.now += 1.5
    stage.hear_words(3, 4, 5)
    ((submit, along),) = stage.said()
    assert isinstance(submit, p.Submit) and submit.id == "a"
    assert along == [p.Chunk(0, [0, 1], "w0 w1 ")]
    stage.hear_words(2, 3)
    assert stage.heard.text == "w0 w1 w2 w3 "


def test_an_answer_that_ends_short_is_asked_for_again_and_not_for_ever() -> None:
    stage = Stage()
    stage.said()
    for _ in range(INCOMPLETE_AT_MOST):
        stage.hear_done(3)
        assert isinstance(stage.said()[0][0], p.Submit)
        assert stage.heard.ends == []
    stage.hear_done(3)
    assert len(stage.heard.ends) == 1 and isinstance(stage.heard.ends[0], LoadOnceError)


OUTCOME = p.encode(p.Outcome("stop", p.Usage(1, 1)))
DAMAGED = {
    "a chunk": (True, p.Chunks(ids=["a"]), [b"\xc1"]),
    "a chunk of the wrong shape": (True, p.Chunks(ids=["a"]), [p.encode({"start": "zero"})]),
    "an outcome": (True, p.Done(id="a"), [b"\xc1"]),
    "an outcome with less than no tokens": (
        True,
        p.Done(id="a"),
        [p.encode({"finish_reason": "stop", "usage": {"prompt_tokens": 1, "completion_tokens": -1}})],
    ),
    "no outcome": (True, p.Done(id="a"), []),
    "a chunk beside an outcome": (False, p.Done(id="a"), [OUTCOME, b"\xc1"]),
}


@pytest.mark.parametrize(("stream", "message", "frames"), DAMAGED.values(), ids=DAMAGED)
def test_output_that_can_not_be_read_is_asked_for_again_and_not_for_ever(
    stream: bool, message: p.BrokerToClient, frames: list[bytes]
) -> None:
    stage = Stage(stream=stream)
    stage.said()
    for _ in range(INCOMPLETE_AT_MOST):
        stage.calls.on_message([p.encode(message), *frames], stage.now)
        assert isinstance(stage.said()[0][0], p.Submit)
        assert stage.heard == Heard()
    stage.calls.on_message([p.encode(message), *frames], stage.now)
    (problem,) = stage.heard.ends
    assert isinstance(problem, InternalError) and "damaged" in str(problem)
    assert [said for said, _ in stage.said()] == [p.Cancel(id="a")]


def test_a_chunk_that_can_not_be_read_costs_the_others_of_its_message_nothing() -> None:
    stage, other = Stage(), Heard()
    request = p.Request(prompt="go", params=p.Params(seed=1))
    stage.calls.submit(p.Submit(id="b", stream=True), request, other, stage.now, 60.0)
    good = p.encode(p.Chunk(0, [0], "w0 "))
    stage.calls.on_message([p.encode(p.Chunks(ids=["a", "b"])), b"\xc1", good], stage.now)
    assert (stage.heard.text, other.text) == ("", "w0 ")


def test_what_a_restarted_broker_does_not_know_is_submitted_again() -> None:
    stage = Stage()
    stage.hear_words(0, 1)
    stage.said()
    stage.wait(p.BEAT_INTERVAL_S)
    ((ping, _),) = stage.said()
    assert isinstance(ping, p.Ping) and ping.pending == ["a"]
    stage.hear(p.Pong(session="new", unknown=["a"], stamp=ping.stamp))
    ((submit, along),) = stage.said()
    assert isinstance(submit, p.Submit) and along == [p.Chunk(0, [0, 1], "w0 w1 ")]
    assert submit.deadline_ms == 59_000, "the deadline goes on counting"


def test_a_pong_to_a_ping_before_the_submit_says_nothing_about_it() -> None:
    stage = Stage()
    stage.wait(p.BEAT_INTERVAL_S)
    stage.wait(p.BEAT_INTERVAL_S)
    stage.said()
    stage.hear(p.Pong(session="new", unknown=["a"], stamp=1))
    assert len(stage.said()) == 1
    stage.hear(p.Pong(session="new", unknown=["a"], stamp=2))
    assert stage.said() == [], "it was sent again after that ping"


def test_a_timeout_cancels_at_the_broker_too() -> None:
    stage = Stage(timeout_s=5)
    stage.said()
    stage.wait(5)
    assert isinstance(stage.heard.ends[0], DeadlineExceeded)
    assert p.Cancel(id="a") in [message for message, _ in stage.said()]
    stage.hear_words(0)
    assert stage.heard.chunks == []


def test_after_cancel_nothing_is_heard() -> None:
    stage = Stage()
    stage.said()
    stage.calls.cancel("a")
    stage.calls.cancel("a")
    assert [message for message, _ in stage.said()] == [p.Cancel(id="a")]
    stage.hear_words(0)
    stage.hear(p.Failed.of(Cancelled("you cancelled it"), "a"))
    assert stage.heard == Heard()


def test_an_error_ends_the_call_with_its_own_class() -> None:
    stage = Stage()
    stage.hear(p.Failed.of(Overloaded("full", retry_after_ms=7), "a"))
    (problem,) = stage.heard.ends
    assert isinstance(problem, Overloaded) and problem.retry_after_ms == 7


def test_an_answer_that_did_not_stream_comes_whole() -> None:
    stage = Stage(stream=False)
    chunks = [p.Chunk(i, [i], WORDS[i]) for i in range(3)]
    stage.hear(p.Done(id="a"), p.Outcome("stop", p.Usage(1, 3)), *chunks)
    assert stage.heard.text == "w0 w1 w2 " and len(stage.heard.ends) == 1


def test_an_id_in_flight_is_refused() -> None:
    stage = Stage()
    with pytest.raises(InvalidRequest, match="in flight"):
        stage.calls.submit(p.Submit(id="a"), p.Request(prompt="x"), Heard(), stage.now, 1)


def test_nothing_is_pinged_for_while_nothing_is_pending() -> None:
    stage = Stage()
    stage.calls.cancel("a")
    stage.said()
    stage.wait(100)
    assert stage.said() == [] and not stage.calls.busy


def test_a_silent_broker_is_pinged_more_rarely() -> None:
    stage = Stage(timeout_s=1000)
    stage.said()
    for _ in range(600):
        stage.wait(0.5)
    assert len(stage.said()) < 100


def test_closing_ends_every_call() -> None:
    stage = Stage()
    stage.calls.fail_all(Cancelled("closed"))
    assert len(stage.heard.ends) == 1 and stage.calls.pending == 0


class LossyWire:
    """A worker that goes on from what was sent along, behind a wire that loses and a broker that forgets."""

    def __init__(self, data: st.DataObject) -> None:
        self.stage = Stage(timeout_s=10_000)
        self.total = data.draw(st.integers(1, len(WORDS)))
        self.at: int | None = 0  # the worker's next word; None: nobody has the request
        self._data = data

    def step(self) -> None:
        self.stage.now += 0.6
        self.stage.calls.tick(self.stage.now)
        for message, along in self.stage.said():
            if isinstance(message, p.Submit):
                self.at = sum(len(chunk.token_ids) for chunk in along)
            elif isinstance(message, p.Ping) and self._data.draw(st.booleans()):
                unknown = ["a"] if self.at is None else []
                self.stage.hear(p.Pong(session="s", unknown=unknown, stamp=message.stamp))
        if self.at is not None:
            self._send(self._data.draw(st.sampled_from(["deliver", "deliver", "lose", "repeat", "restart"])))

    def _send(self, fate: str) -> None:
        assert self.at is not None
        if fate == "restart":
            self.at = None
        elif self.at < self.total:
            times = {"lose": 0, "repeat": 2}.get(fate, 1)
            self.stage.hear_words(*[self.at] * times)
            self.at += 1
        else:
            self.at = None
            if fate != "lose":
                self.stage.hear_done(self.total)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_lost_repeated_or_restarted_the_story_is_whole(data: st.DataObject) -> None:
    wire = LossyWire(data)
    heard = wire.stage.heard
    for _ in range(200):
        if heard.ends:
            break
        wire.step()
    assert heard.text == "".join(WORDS[: len(heard.chunks)])
    assert len(heard.ends) <= 1
    if heard.ends and isinstance(heard.ends[0], p.Outcome):
        assert heard.text == "".join(WORDS[: wire.total])


def test_a_request_without_a_seed_is_given_one() -> None:
    body = p.decode_request(encode_request(p.Request(prompt="x")))
    assert body.params.seed is not None
    assert p.decode_request(encode_request(p.Request(prompt="x", params=p.Params(seed=5)))).params.seed == 5


def test_a_request_past_the_frame_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        encode_request(p.Request(prompt="x" * (p.MAX_FRAME_BYTES + 1)))


def test_equal_beginnings_have_equal_hashes_and_different_ones_differ() -> None:
    shared = b"s" * 2048
    one, two = prefix_hashes(shared + b"a" * 1024), prefix_hashes(shared + b"b" * 1024)
    assert one[:4] == two[:4] and one[4] != two[4]
    assert len(prefix_hashes(b"x" * 10_000_000)) == p.MAX_PREFIX_BLOCKS
    assert prefix_hashes(b"short") == []


def test_the_cost_counts_prompt_and_output() -> None:
    request = p.Request(token_ids=list(range(100)), params=p.Params(max_tokens=50))
    assert estimate_cost(request, text_bytes(request)) == 151
    assert make_submit(request, model="m", tenant="t").cost == 151
