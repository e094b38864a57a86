"""Peers on real sockets that vanish, come twice, stop or stand still: who gets what afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from broker import protocol as p
from broker.errors import RequestFailed
from examples.scripted_worker import scripted
from tests.peers import RawClient, RawWorker, raw
from tests.pool import Pool, wait_for


def test_c62_a_client_that_closes_at_once_is_noticed_and_its_work_is_dropped(pool: Pool) -> None:
    pool.broker()
    with raw(pool.directory) as (client, worker):
        assert isinstance(worker.register(), p.BrokerBeat)
        client.submit("a", stream=True)
        work, _ = worker.work()
        client.close()

        def dropped() -> bool:
            worker.say(p.Chunks([work.id], [1]), p.encode(p.Chunk(token_ids=[1])))
            return pool.status().in_flight == 0

        wait_for(dropped, "the drop")
        told = worker.told()
        while isinstance(told, p.BrokerBeat):
            told = worker.told()
        assert told == p.CancelWork([work.id])
    assert pool.status().unroutable >= 1


def test_c62_work_for_a_worker_that_has_vanished_goes_to_another(pool: Pool) -> None:
    pool.broker()
    with raw(pool.directory) as (client, gone):
        gone.register("gone", slots=4)
        gone.close()
        with RawWorker(f"ipc://{pool.directory}/workers") as worker:
            worker.register("stays", slots=4)
            client.submit("a")
            work, _ = worker.work()
            worker.finish(work.id)
            assert isinstance(client.answer(), p.Done)
    status = pool.status()
    assert [w.name for w in status.workers] == ["stays"]


@pytest.mark.parametrize(
    "chunk", [b"\xc1", p.encode({"token_ids": "none"}), b""], ids=["bytes", "shape", "empty"]
)
def test_a_chunk_that_is_none_is_the_fault_of_its_request_alone(pool: Pool, chunk: bytes) -> None:
    pool.broker()
    worker = pool.scripted("gpu0")
    with RawClient(f"ipc://{pool.directory}/clients") as client:
        request = p.Request(prompt="hi", params=p.Params(max_tokens=4, seed=1))
        client.say(p.Submit(id="a"), p.encode(request), chunk)
        answer = client.answer()
        assert isinstance(answer, p.Failed) and answer.code == "invalid_request", answer
        client.submit("b")
        assert isinstance(client.answer(), p.Done)
    assert worker.poll() is None


def test_c63_a_living_namesake_is_refused_and_the_log_says_so(pool: Pool) -> None:
    pool.broker()
    first = pool.scripted("gpu0")
    second = pool.start("namesake", "examples/scripted_worker.py", "--name", "gpu0")
    wait_for(lambda: "worker_refused" in pool.log("broker"), "the refusal")
    wait_for(lambda: f"pid {first.pid}" in pool.log("namesake"), "the reason, told to the second")
    worker = pool.worker("gpu0")
    assert worker is not None and worker.pid == first.pid
    assert second.poll() is None


def test_c63_a_killed_worker_that_comes_back_is_served_within_a_liveness_period(pool: Pool) -> None:
    pool.broker()
    pool.scripted("gpu0")
    pool.kill("gpu0")
    began = time.monotonic()
    again = pool.scripted("gpu0")
    assert time.monotonic() - began < p.LIVENESS_S + 3
    with pool.client() as client:
        assert client.generate("back", max_tokens=2, seed=1).worker == "gpu0"
    assert again.poll() is None


def test_c63_the_same_identity_connected_anew_takes_over(pool: Pool) -> None:
    pool.broker()
    address = f"ipc://{pool.directory}/workers"
    old = RawWorker(address, b"gpu0")
    old.register(pid=1)
    with RawWorker(address, b"gpu0") as new:
        assert isinstance(new.register(pid=2), p.BrokerBeat)
        (worker,) = pool.status().workers
        assert worker.pid == 2
    old.close()


def test_c65_a_slow_worker_of_two_slots_has_two_and_the_broker_the_rest(pool: Pool) -> None:
    pool.broker()
    with raw(pool.directory) as (client, worker):
        worker.register(slots=2)
        for n in range(100):
            client.submit(f"r{n}")
        wait_for(lambda: pool.status().in_flight == 100, "all of them")
        status = pool.status()
        assert (status.workers[0].in_hand, status.models[0].waiting) == (2, 98)
        received = 0
        while (frames := worker.heard(300)) is not None:
            received += isinstance(p.decode_header(p.to_worker, frames[0]), p.Work)
        assert received == 2


def test_c69_a_stopped_broker_expires_nobody_when_it_goes_on(pool: Pool) -> None:
    broker = pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "20")
    with pool.client() as client, client.stream("long", max_tokens=200, seed=1) as stream:
        words = [next(iter(stream)).text]
        broker.send_signal(signal.SIGSTOP)
        time.sleep(p.LIVENESS_S + 2)  # the pause is the input
        broker.send_signal(signal.SIGCONT)
        words += [chunk.text for chunk in stream]
    assert "".join(words) == "".join(scripted("long", 1, 200))
    status = pool.status()
    assert (status.worker_deaths, status.continuations) == (0, 0)
    assert "broker_paused" in pool.log("broker")


def test_c69_any_message_counts_as_a_beat(pool: Pool) -> None:
    pool.broker()
    with raw(pool.directory) as (client, worker):
        worker.register()
        client.submit("a", stream=True)
        work, _ = worker.work()
        until = time.monotonic() + p.LIVENESS_S + 1
        step = 0
        while time.monotonic() < until:
            worker.say(p.Chunks([work.id], [1]), p.encode(p.Chunk(start=step, token_ids=[1])))
            step += 1
            client.hear()
            time.sleep(0.2)
        assert [w.name for w in pool.status().workers] == ["gpu0"]


def test_c70_a_stopped_worker_delays_nobody_at_the_other(pool: Pool) -> None:
    pool.broker()
    stopped = pool.scripted("gpu0", "--slots", "64", "--steps-per-s", "200")
    pool.scripted("gpu1", "--slots", "64", "--steps-per-s", "200")
    stopped.send_signal(signal.SIGSTOP)
    took: list[tuple[str, int, float]] = []  # worker, attempts, seconds
    with pool.client() as client:

        def ask(n: int) -> None:
            began = time.monotonic()
            answer = client.generate(f"{n}", max_tokens=4, seed=n)
            assert answer.text == "".join(scripted(f"{n}", n, 4))
            took.append((answer.worker, answer.attempts, time.monotonic() - began))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(50)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)  # ten requests a second are the input
        for thread in threads:
            thread.join(30)
    assert len(took) == 50 and {worker for worker, _, _ in took} == {"gpu1"}
    at_once = [seconds for _, attempts, seconds in took if attempts == 1]
    assert len(at_once) > 5 and max(at_once) < 2.0, "nobody at the healthy one waited for the other"
    stopped.send_signal(signal.SIGCONT)
    wait_for(lambda: pool.worker("gpu0"), "its return", timeout_s=5)


def test_c71_a_killed_worker_s_three_requests_each_end_once_and_whole(pool: Pool) -> None:
    pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "10", "--slots", "3")
    texts: dict[str, str] = {}
    with pool.client() as client:

        def whole(prompt: str) -> None:
            texts[prompt] = client.generate(prompt, max_tokens=20, seed=5).text

        with client.stream("streams", max_tokens=20, seed=5) as stream:
            words = [next(iter(stream)).text]
            threads = [threading.Thread(target=whole, args=(name,)) for name in ("whole", "fresh")]
            for thread in threads:
                thread.start()
            wait_for(lambda: pool.status().in_flight == 3, "all three")
            pool.kill("gpu0")
            pool.scripted("gpu1", "--steps-per-s", "200", "--slots", "3")
            words += [chunk.text for chunk in stream]
        for thread in threads:
            thread.join(30)
    texts["streams"] = "".join(words)
    assert texts == {name: "".join(scripted(name, 5, 20)) for name in ("streams", "whole", "fresh")}


def test_a_request_that_kills_every_worker_is_stopped_after_two_and_the_others_live(pool: Pool) -> None:
    pool.broker()
    for n in range(3):
        pool.scripted(f"gpu{n}", "--steps-per-s", "100")
    with pool.client() as client:
        with pytest.raises(RequestFailed, match="2 workers"):
            client.generate("@crash=3", max_tokens=8, seed=1)
        assert len(pool.status().workers) == 1
        assert client.generate("innocent", max_tokens=3, seed=1).text == "".join(scripted("innocent", 1, 3))


def test_a_worker_that_exits_is_gone_at_once_when_the_broker_is_told(pool: Pool) -> None:
    from broker.admin import ask

    pool.broker()
    worker = pool.scripted("gpu0")
    os.kill(worker.pid, signal.SIGSTOP)  # so that nothing but the message can tell
    message, _ = ask(p.AdminGone(worker.pid), pool.admin)
    assert "elsewhere" in message
    assert pool.worker("gpu0") is None


def test_prompts_that_begin_alike_go_to_the_worker_that_knows_them(pool: Pool) -> None:
    pool.broker()
    for n in range(2):
        pool.scripted(f"gpu{n}", "--steps-per-s", "500")
    beginning = "once upon a time " * 200
    with pool.client() as client:
        workers = {client.generate(f"{beginning}{n}", max_tokens=1, seed=1).worker for n in range(6)}
    assert len(workers) == 1


def test_a_pong_says_what_the_broker_does_not_have(pool: Pool) -> None:
    pool.broker()
    with RawClient(pool.clients) as client:
        client.submit("a")
        client.say(p.Ping(["a", "b"], stamp=3))
        pong = client.answer()
        assert isinstance(pong, p.Pong) and (pong.unknown, pong.stamp) == (["b"], 3)
        assert pong.session == pool.status().session
