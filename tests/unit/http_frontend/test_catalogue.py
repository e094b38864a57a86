"""Which models there are, as the broker says."""

from __future__ import annotations

import asyncio
import io
import itertools

import pytest

from broker.errors import LoadOnceError, ModelNotFound, Unavailable
from broker.logs import Log
from broker.protocol import ModelInfo
from http_frontend import catalogue as module
from http_frontend.catalogue import Catalogue


class Clock:
    """Time as the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def nobody() -> list[ModelInfo]:
    raise Unavailable("no broker")


def make(clock: Clock) -> Catalogue:
    return Catalogue(nobody, clock, Log("x", stream=io.StringIO()))


def test_before_any_worker_has_come_a_request_may_try_again() -> None:
    with pytest.raises(Unavailable) as refused:
        make(Clock()).find("m")
    assert refused.value.retry_after_ms


def test_names_aliases_and_the_default() -> None:
    models = make(Clock())
    models.heard([ModelInfo("a", 1, 1, ["b"]), ModelInfo("b", 2, 2)])
    assert models.find(None).name == models.find("").name == "a"
    assert models.find("b").name == "b"  # a name wins over another model's alias
    with pytest.raises(ModelNotFound) as refused:
        models.find("c")
    assert refused.value.param == "model"


def test_ready_needs_a_worker_and_a_broker_that_speaks() -> None:
    clock = Clock()
    models = make(clock)
    assert models.ready == []
    models.heard([ModelInfo("a", 1, 1)])
    assert models.ready == []
    models.heard([ModelInfo("a", 1, 1, workers=2)])
    assert models.ready == ["a"]
    clock.now += 5.1
    assert models.ready == []


async def test_a_silent_broker_is_logged_once_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.001)
    answers: list[list[ModelInfo] | LoadOnceError] = [
        Unavailable("x"),
        Unavailable("x"),
        [ModelInfo("a", 1, 1)],
    ]
    heard = asyncio.Event()

    async def ask() -> list[ModelInfo]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, LoadOnceError):
            raise answer
        heard.set()
        return answer

    log = io.StringIO()
    models = Catalogue(ask, Clock(), Log("x", stream=log))
    task = asyncio.ensure_future(models.run())
    async with asyncio.timeout(5):
        await heard.wait()
        while "answers again" not in log.getvalue():
            await asyncio.sleep(0.001)
    task.cancel()
    assert log.getvalue().count("doesn't answer") == 1
    assert models.find("a").name == "a"


async def test_a_worker_that_registered_since_is_found_and_the_broker_asked_once_for_all() -> None:
    """Two frontends share a port: one has said that a model is ready, the request goes to the other."""
    asked = 0

    async def ask() -> list[ModelInfo]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return [ModelInfo("a", 1, 1)]

    models = Catalogue(ask, Clock(), Log("x", stream=io.StringIO()))
    found = await asyncio.gather(*(models.look_up("a") for _ in range(20)))
    assert {model.name for model in found} == {"a"} and asked == 1
    with pytest.raises(ModelNotFound):
        await models.look_up("c")
    assert asked == 2


async def test_what_was_heard_a_moment_before_the_request_is_no_reason_to_refuse_it() -> None:
    """Since then the worker has registered, and the other frontend on this port has said that it is ready."""
    registered: list[ModelInfo] = []

    async def ask() -> list[ModelInfo]:
        return list(registered)

    models = Catalogue(ask, asyncio.get_running_loop().time, Log("x", stream=io.StringIO()))
    with pytest.raises(Unavailable):
        await models.look_up("a")
    registered.append(ModelInfo("a", 1, 1))
    assert (await models.look_up("a")).name == "a"


async def test_one_that_comes_while_the_broker_is_asked_waits_for_the_next_answer() -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()
    registered: list[ModelInfo] = []

    async def ask() -> list[ModelInfo]:
        said = list(registered)
        asked.set()
        await may_answer.wait()
        return said

    models = Catalogue(ask, asyncio.get_running_loop().time, Log("x", stream=io.StringIO()))
    early = asyncio.create_task(models.look_up("a"))
    await asked.wait()
    registered.append(ModelInfo("a", 1, 1))
    late = asyncio.create_task(models.look_up("a"))
    await asyncio.sleep(0)
    may_answer.set()
    with pytest.raises(Unavailable):
        await early
    assert (await asyncio.wait_for(late, 5)).name == "a"


async def test_questions_keep_their_distance() -> None:
    times: list[float] = []
    clock = asyncio.get_running_loop().time

    async def ask() -> list[ModelInfo]:
        times.append(clock())
        return []

    models = Catalogue(ask, clock, Log("x", stream=io.StringIO()))
    for _ in range(3):
        await asyncio.gather(*(models.look_up("a") for _ in range(10)), return_exceptions=True)
    assert len(times) == 3
    assert all(after - before >= 0.9 * module.REST_S for before, after in itertools.pairwise(times))


async def test_a_silent_broker_makes_a_request_wait_a_moment_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.01)

    async def silence() -> list[ModelInfo]:
        await asyncio.sleep(3600)
        return []

    models = Catalogue(silence, Clock(), Log("x", stream=io.StringIO()))
    with pytest.raises(Unavailable):
        await asyncio.wait_for(models.look_up("a"), 5)
