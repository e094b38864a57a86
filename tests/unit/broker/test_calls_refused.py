"""What a call may not be, and whom an answer is for: a fault stays with the call that has it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from broker import protocol as p
from broker.calls import LONGEST_S, Calls, bounded_timeout
from broker.errors import Cancelled, InvalidRequest, LoadOnceError, VersionMismatch
from tests.unit.broker.test_calls import Heard

REQUEST = p.Request(prompt="go", params=p.Params(seed=1))


def begin(calls: Calls, heard: Any, *, stream: bool = True) -> None:
    calls.submit(p.Submit(id="a", stream=stream), REQUEST, heard, 10.0, 60.0)
    calls.take()


@pytest.mark.parametrize(
    ("submit", "field"),
    [
        (p.Submit(id=""), "id"),
        (p.Submit(id="with space"), "id"),
        (p.Submit(id="i" * 65), "id"),
        (p.Submit(id="a", model="m" * 129), "model"),
        (p.Submit(id="a", tenant="t" * 129), "tenant"),
        (p.Submit(id="a", priority=10), "priority"),
        (p.Submit(id="a", cost=-1), "cost"),
        (p.Submit(id="a", prefix=[1] * (p.MAX_PREFIX_BLOCKS + 1)), "prefix"),
    ],
)
def test_a_header_that_the_broker_would_refuse_is_never_sent(submit: p.Submit, field: str) -> None:
    calls = Calls(0.0)
    with pytest.raises(InvalidRequest) as raised:
        calls.submit(submit, REQUEST, Heard(), 0.0, 60.0)
    assert raised.value.param == field
    assert not calls.busy and calls.take() == []


@pytest.mark.parametrize(
    "submit",
    [p.Submit(id="\ud800"), p.Submit(id="a", model="\ud800"), p.Submit(id="a", tenant="\ud800")],
    ids=["id", "model", "tenant"],
)
def test_c15_half_a_surrogate_pair_in_a_header_is_refused(submit: p.Submit) -> None:
    calls = Calls(0.0)
    with pytest.raises(InvalidRequest, match="Unicode"):
        calls.submit(submit, REQUEST, Heard(), 0.0, 60.0)
    assert not calls.busy and calls.take() == []


@pytest.mark.parametrize("tools", [[{"f": object()}], [{"f": 2**70}]])
def test_what_has_no_place_in_a_message_is_refused_and_not_begun(tools: list[dict[str, Any]]) -> None:
    calls = Calls(0.0)
    request = p.Request(messages=[p.ChatMessage("user", "hi")], tools=tools)
    with pytest.raises(InvalidRequest):
        calls.submit(p.Submit(id="a"), request, Heard(), 0.0, 60.0)
    assert not calls.busy and calls.take() == []


@pytest.mark.parametrize(
    ("given", "seconds"), [(math.inf, LONGEST_S), (10**400, LONGEST_S), (-1, 0), (-math.inf, 0), (2, 2)]
)
def test_a_timeout_of_any_size_fits_the_wire(given: float, seconds: float) -> None:
    assert bounded_timeout(given) == seconds
    calls = Calls(0.0)
    calls.submit(p.Submit(id="a"), REQUEST, Heard(), 0.0, given)
    (message,) = calls.take()
    assert isinstance(p.decode_header(p.from_client, message[0]), p.Submit)


@pytest.mark.parametrize("given", [math.nan, "5", None])
def test_a_timeout_must_be_a_number(given: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        bounded_timeout(given)
    assert raised.value.param == "timeout_s"


def test_a_call_given_up_while_its_answer_is_read_is_not_asked_for_again() -> None:
    calls = Calls(0.0)

    class GivesUp(Heard):
        def on_chunk(self, chunk: p.Chunk) -> None:
            calls.cancel("a")

    heard = GivesUp()
    begin(calls, heard, stream=False)
    bodies = [p.Outcome("stop", p.Usage(1, 2)), p.Chunk(0, [1], "x"), p.Chunk(1, [2], "y")]
    calls.on_message([p.encode(p.Done(id="a")), *map(p.encode, bodies)], 11.0)
    said = [p.decode_header(p.from_client, frames[0]) for frames in calls.take()]
    assert said == [p.Cancel(id="a")]
    assert heard.ends == [] and not calls.busy


def test_one_answer_about_models_is_for_all_who_wait() -> None:
    calls = Calls(0.0)
    first: list[object] = []
    second: list[object] = []
    calls.list_models(first.append)
    calls.list_models(second.append)
    answer = p.Models(models=[], session="s")
    for _ in range(2):
        calls.on_message([p.encode(answer)], 1.0)
    assert first == second == [answer]
    assert not calls.busy


def test_who_stopped_waiting_for_models_hears_nothing() -> None:
    calls = Calls(0.0)
    heard: list[object] = []
    hear = heard.append
    calls.list_models(hear)
    calls.forget_models(hear)
    calls.forget_models(hear)
    assert not calls.busy
    calls.on_message([p.encode(p.Models(models=[], session="s"))], 1.0)
    assert heard == []


@pytest.mark.parametrize("problem", [Cancelled("closed"), VersionMismatch("version 1 is spoken here")])
def test_who_waits_for_models_hears_why_there_are_none(problem: LoadOnceError) -> None:
    calls = Calls(0.0)
    heard: list[Any] = []
    calls.list_models(heard.append)
    calls.on_message([p.encode(p.Failed.of(problem))], 1.0)
    (said,) = heard
    assert type(said) is type(problem)
    assert not calls.busy
