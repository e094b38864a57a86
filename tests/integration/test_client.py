"""Both clients against a real broker and scripted workers: answers, streams, forks, threads, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from broker.client import AsyncClient, Client
from broker.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from examples.scripted_worker import scripted
from tests.pool import ROOT, Pool, wait_for


def expected(prompt: str, seed: int, count: int) -> str:
    return "".join(scripted(prompt, seed, count))


@pytest.fixture
def served(pool: Pool) -> Pool:
    """A broker with one scripted worker."""
    pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "500", "--slots", "16")
    return pool


def test_an_answer_comes_whole_with_its_usage(served: Pool) -> None:
    with served.client() as client:
        answer = client.generate("the capital of", max_tokens=5, seed=3)
    assert answer.text == expected("the capital of", 3, 5)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 5)
    assert (answer.finish_reason, answer.worker, answer.attempts, answer.seed) == ("length", "gpu0", 1, 3)


def test_a_stream_comes_in_pieces_and_says_how_it_ended(served: Pool) -> None:
    with served.client() as client, client.stream("go on", max_tokens=8, seed=1) as stream:
        chunks = list(stream)
    assert [chunk.start for chunk in chunks] == list(range(8))
    assert "".join(chunk.text for chunk in chunks) == expected("go on", 1, 8)
    assert stream.outcome is not None and stream.outcome.finish_reason == "length"


def test_a_request_without_a_seed_is_given_one(served: Pool) -> None:
    with served.client() as client:
        first = client.generate("x", max_tokens=4)
        assert first.seed is not None
        assert client.generate("x", max_tokens=4, seed=first.seed).text == first.text


def test_leaving_a_stream_early_stops_the_work(served: Pool) -> None:
    with served.client() as client:
        with client.stream("long", max_tokens=100_000) as stream:
            next(iter(stream))
        wait_for(lambda: served.status().in_flight == 0, "the slot to be free")


def test_a_timeout_gives_the_request_up(served: Pool) -> None:
    with served.client() as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("long", max_tokens=100_000, timeout_s=0.5)
        wait_for(lambda: served.status().in_flight == 0, "the slot to be free")


@pytest.mark.parametrize(
    ("params", "field"),
    [({"temperature": 3}, "temperature"), ({"max_tokens": -1}, "max_tokens"), ({"best_of": 2}, "best_of")],
)
def test_a_wrong_parameter_is_named_before_anything_is_sent(
    served: Pool, params: dict[str, Any], field: str
) -> None:
    with served.client() as client:
        with pytest.raises(InvalidRequest) as caught:
            client.generate("x", **params)
        assert caught.value.param == field
    assert served.status().submitted == 0


def test_c15_half_a_surrogate_pair_is_refused_and_the_next_request_works(served: Pool) -> None:
    with served.client() as client:
        with pytest.raises(InvalidRequest, match="Unicode"):
            client.generate("hello \ud800 world")
        assert client.generate("hello", max_tokens=1, seed=0).text == expected("hello", 0, 1)


def test_a_model_that_nobody_serves_is_not_found(pool: Pool) -> None:
    pool.broker("--no-worker-wait-s", "0")
    pool.scripted()
    with pool.client() as client, pytest.raises(ModelNotFound):
        client.generate("x", model="gpt-17")


def test_without_workers_a_request_is_refused_after_a_short_wait(pool: Pool) -> None:
    pool.broker("--no-worker-wait-s", "0.5")
    with pool.client() as client, pytest.raises(Unavailable) as caught:
        client.generate("x")
    assert caught.value.retry_after_ms


def test_a_workers_error_reaches_its_caller_only(served: Pool) -> None:
    with served.client() as client:
        with pytest.raises(InternalError):
            client.generate("@fail=2", max_tokens=5)
        assert client.generate("fine", max_tokens=2, seed=0).text == expected("fine", 0, 2)


def test_sixty_four_threads_each_get_their_own_answer(served: Pool) -> None:
    answers: dict[int, str] = {}
    with served.client() as client:

        def ask(i: int) -> None:
            answers[i] = client.generate(f"prompt {i}", max_tokens=10, seed=i).text

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {i: expected(f"prompt {i}", i, 10) for i in range(64)}


def test_a_client_made_and_used_before_a_fork_works_on_both_sides(served: Pool) -> None:
    with served.client() as client:
        assert client.generate("parent", max_tokens=2, seed=0).text == expected("parent", 0, 2)
        pids = []
        for i in range(4):
            pid = os.fork()
            if pid == 0:
                mine = client.generate(f"child {i}", max_tokens=5, seed=i).text
                os._exit(0 if mine == expected(f"child {i}", i, 5) else 1)
            pids.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0, 0]
        assert client.generate("parent", max_tokens=2, seed=0).text == expected("parent", 0, 2)


async def test_the_async_client_keeps_many_answers_apart(served: Pool) -> None:
    async with AsyncClient(served.clients) as client:
        asked = [client.generate(f"p {i}", max_tokens=6, seed=i) for i in range(200)]
        answers = await asyncio.gather(*asked)
    assert [a.text for a in answers] == [expected(f"p {i}", i, 6) for i in range(200)]


async def test_an_async_stream_comes_in_pieces(served: Pool) -> None:
    async with AsyncClient(served.clients) as client, client.stream("go", max_tokens=8, seed=1) as stream:
        text = "".join([chunk.text async for chunk in stream])
    assert text == expected("go", 1, 8)
    assert stream.outcome is not None


async def test_cancelling_a_task_cancels_its_request(served: Pool) -> None:
    async with AsyncClient(served.clients) as client:
        task = asyncio.create_task(client.generate("long", max_tokens=100_000))
        while served.status().in_flight == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while served.status().in_flight:
            await asyncio.sleep(0.01)


async def test_models_and_readiness_are_known(served: Pool) -> None:
    async with AsyncClient(served.clients) as client:
        await client.wait_ready(10)
        (model,) = await client.models()
    assert (model.name, model.workers) == ("scripted", 1)


def test_closing_a_client_ends_its_calls(served: Pool) -> None:
    client = served.client()
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            client.generate("long", max_tokens=100_000)
        except Cancelled as problem:
            problems.append(problem)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: served.status().in_flight == 1, "the request")
    client.close()
    thread.join()
    assert len(problems) == 1
    wait_for(lambda: served.status().in_flight == 0, "the slot to be free")


def test_a_stream_goes_on_after_the_broker_was_killed(pool: Pool) -> None:
    pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "50")
    with pool.client() as client, client.stream("story", max_tokens=150, seed=5) as stream:
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 30:
                pool.kill("broker")
                pool.broker()
    assert "".join(chunk.text for chunk in chunks) == expected("story", 5, 150)
    starts = [chunk.start for chunk in chunks]
    assert starts == sorted(set(starts))


def test_c71_a_stream_goes_on_after_its_worker_was_killed(pool: Pool) -> None:
    pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "50")
    with pool.client() as client, client.stream("story", max_tokens=150, seed=5) as stream:
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 30:
                pool.scripted("gpu1", "--steps-per-s", "500")
                pool.kill("gpu0")
    assert "".join(chunk.text for chunk in chunks) == expected("story", 5, 150)
    assert stream.done is not None and (stream.done.worker, stream.done.attempts) == ("gpu1", 2)


def test_c73_a_program_with_unsent_requests_ends_while_the_broker_is_down(pool: Pool) -> None:
    script = (
        "import sys, threading\n"
        "from broker.client import Client\n"
        "client = Client(sys.argv[1])\n"
        "threading.Thread(target=client.generate, args=('x',), daemon=True).start()\n"
        "import time; time.sleep(0.3)\n"
    )
    begun = time.monotonic()
    command = [sys.executable, "-c", script, pool.clients]
    done = subprocess.run(command, cwd=ROOT, timeout=20, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 10


def test_a_paused_client_that_vanishes_frees_its_slots(served: Pool) -> None:
    script = (
        "import sys\nfrom broker.client import Client\n"
        "Client(sys.argv[1]).generate('long', max_tokens=100_000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, served.clients], cwd=ROOT)
    wait_for(lambda: served.status().in_flight == 1, "the request")
    time.sleep(1.5)  # at least one ping, so that silence means something
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: served.status().in_flight == 0, "the slot to be free", timeout_s=6.0)


def test_a_client_may_be_used_again_after_close(served: Pool) -> None:
    client = Client(served.clients)
    assert client.generate("a", max_tokens=1, seed=0).text == expected("a", 0, 1)
    client.close()
    assert client.generate("b", max_tokens=1, seed=0).text == expected("b", 0, 1)
    client.close()
