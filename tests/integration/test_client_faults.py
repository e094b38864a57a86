"""What a program may do wrong with a client, or meet with: it is told, nobody else is, nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from broker import protocol as p
from broker import wire
from broker.client import AsyncClient, AsyncStream, Client
from broker.curve import KeysMissing
from broker.errors import Cancelled, InternalError, InvalidRequest, Overloaded, Unavailable
from examples.scripted_worker import scripted
from tests.integration.test_broker_life import make_keys
from tests.pool import ROOT, Pool, wait_for

TURN = {"role": "user", "content": "hi"}
WRONG: list[tuple[Callable[[Client], Any], str]] = [
    (lambda c: c.generate("x", model="\ud800"), "model"),
    (lambda c: c.generate("x", model="m" * 200), "model"),
    (lambda c: c.generate("x", priority=77), "priority"),
    (lambda c: c.generate("x", timeout_s=math.nan), "timeout_s"),
    (lambda c: c.generate("x", timeout_s="5"), "timeout_s"),  # type: ignore[arg-type]
    (lambda c: c.chat([TURN], tools=[{"a": object()}]), "request"),
    (lambda c: c.chat([TURN], tools=[{"a": 2**70}]), "request"),
    (lambda c: list(c.stream("\ud800")), "request"),
]


def expected(prompt: str, seed: int, count: int) -> str:
    return "".join(scripted(prompt, seed, count))


def client_threads() -> int:
    return sum(thread.name == "loadonce-client" for thread in threading.enumerate())


@pytest.fixture
def served(pool: Pool) -> Pool:
    """A broker with one scripted worker."""
    pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "500", "--slots", "16")
    return pool


@pytest.mark.parametrize(("call", "named"), WRONG)
def test_c15_a_wrong_argument_fails_its_own_call_only(
    served: Pool, call: Callable[[Client], Any], named: str
) -> None:
    with served.client() as client, client.stream("other", max_tokens=100, seed=1) as other:
        begun = iter(other)
        first = next(begun)
        with pytest.raises(InvalidRequest, match=named):
            call(client)
        assert first.text + "".join(chunk.text for chunk in begun) == expected("other", 1, 100)


def test_a_wait_without_end_may_be_asked_for(served: Pool) -> None:
    with served.client() as client:
        answer = client.generate("x", max_tokens=3, seed=1, timeout_s=math.inf)
        assert answer.text == expected("x", 1, 3)


def test_a_slow_reader_is_told_and_its_work_stops(served: Pool) -> None:
    with Client(served.clients, buffered_chunks=20) as client:
        stream = client.stream("long", max_tokens=100_000)
        wait_for(lambda: stream.waiting() > 20, "the reader to be behind")
        wait_for(lambda: served.status().in_flight == 0, "the call to be given up")
        with pytest.raises(Overloaded, match="20 chunks behind"):
            list(stream)
        with pytest.raises(Overloaded):
            next(iter(stream))  # said again, not waited for


async def test_a_slow_async_reader_is_told(served: Pool) -> None:
    async with AsyncClient(served.clients, buffered_chunks=20) as client:
        stream = client.stream("long", max_tokens=100_000)
        while stream.waiting() <= 20:
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="20 chunks behind"):
            async for _ in stream:
                pass


def test_a_whole_answer_may_have_more_chunks_than_a_stream_may_leave_unread(served: Pool) -> None:
    with Client(served.clients, buffered_chunks=5) as client:
        assert client.generate("x", max_tokens=200, seed=1).text == expected("x", 1, 200)


def test_a_stream_given_up_by_another_thread_ends_for_its_reader(served: Pool) -> None:
    with served.client() as client:
        stream = client.stream("long", max_tokens=100_000)
        chunks = iter(stream)
        next(chunks)
        threading.Timer(0.1, stream.cancel).start()
        with pytest.raises(Cancelled):
            for _ in chunks:
                pass
        wait_for(lambda: served.status().in_flight == 0, "the slot to be free")


def test_what_can_not_be_read_is_in_the_programs_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"ipc://{tmp_path}/clients"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as broker, Client(address) as client:
        broker.linger = 0
        broker.bind(address)
        with ThreadPoolExecutor(1) as other:
            asked = other.submit(client.models, 30)
            who, *_ = broker.recv_multipart()
            broker.send_multipart([who, b"\xc1"])
            broker.send_multipart([who, p.encode(p.Models(models=[], session="s"))])
            assert asked.result(30) == []
    (line,) = [record.getMessage() for record in caplog.records if record.name == "loadonce"]
    assert "1 messages of the broker dropped" in line


def test_every_reader_of_a_stream_hears_its_end(served: Pool) -> None:
    with served.client() as client, ThreadPoolExecutor(3) as readers:
        stream = client.stream("x", max_tokens=200, seed=1)
        parts = list(readers.map(lambda _: list(stream), range(3), timeout=30))
        assert sum(map(len, parts)) > 0 and list(stream) == []
        ordered = sorted((chunk for part in parts for chunk in part), key=lambda chunk: chunk.start)
        assert "".join(chunk.text for chunk in ordered) == expected("x", 1, 200)


async def test_every_reader_of_an_async_stream_hears_its_end(served: Pool) -> None:
    async def texts(stream: AsyncStream) -> list[p.Chunk]:
        return [chunk async for chunk in stream]

    async with AsyncClient(served.clients) as client, asyncio.timeout(30):
        stream = client.stream("x", max_tokens=200, seed=1)
        parts = await asyncio.gather(*(texts(stream) for _ in range(3)))
        ordered = sorted((chunk for part in parts for chunk in part), key=lambda chunk: chunk.start)
        assert "".join(chunk.text for chunk in ordered) == expected("x", 1, 200)


def test_a_stream_begun_before_a_fork_is_refused_in_the_child_and_goes_on_in_the_parent(served: Pool) -> None:
    with served.client() as client:
        stream = client.stream("x", max_tokens=50, seed=1)
        child = os.fork()
        if child == 0:
            try:
                next(iter(stream))
            except RuntimeError as problem:
                os._exit(7 if "fork" in str(problem) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert "".join(chunk.text for chunk in stream) == expected("x", 1, 50)


def test_calls_that_meet_a_close_are_cancelled_and_none_hangs(served: Pool) -> None:
    client = served.client()
    stop = threading.Event()
    ends: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            try:
                client.generate("x", max_tokens=3)
            except Cancelled:
                ends.append("cancelled")

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        client.close()
    stop.set()
    for thread in threads:
        thread.join(20)
    client.close()
    assert not any(thread.is_alive() for thread in threads)


def test_a_failed_thread_tells_all_who_wait_and_the_next_call_works(
    served: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.client() as client:
        stream = client.stream("long", max_tokens=100_000)
        next(iter(stream))
        with monkeypatch.context() as broken:
            broken.setattr(wire, "deliver", lambda *_: 1 / 0)
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                list(stream)
        assert client.generate("x", max_tokens=3, seed=1).text == expected("x", 1, 3)


def test_a_dropped_client_leaves_no_thread_behind(served: Pool) -> None:
    before = client_threads()
    client = Client(served.clients)
    client.generate("x", max_tokens=1)
    assert client_threads() == before + 1
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    wait_for(lambda: client_threads() == before, "the thread to end")


def test_a_lost_answer_about_models_does_not_shift_the_later_ones(pool: Pool) -> None:
    with Client(pool.clients) as client:
        for _ in range(3):
            with pytest.raises(Unavailable):
                client.models(0.05)  # nobody is there
        pool.broker()
        pool.scripted("gpu0")
        client.wait_ready(20)
        begun = time.monotonic()
        assert [model.name for model in client.models()] == ["scripted"]
        assert time.monotonic() - begun < 5


def test_children_of_a_fork_under_load_get_their_own_answers(served: Pool) -> None:
    client = served.client()
    stop = threading.Event()
    wrong: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            if client.generate("parent", max_tokens=5, seed=9).text != expected("parent", 9, 5):
                wrong.append("parent")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    pids = []
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            text = client.generate(f"child {number}", max_tokens=5, seed=number, timeout_s=20).text
            os._exit(0 if text == expected(f"child {number}", number, 5) else 1)
        pids.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    stop.set()
    for thread in threads:
        thread.join()
    client.close()
    assert ends == [0] * 8
    assert not wrong


def test_c73_a_child_that_ends_in_the_usual_way_closes_nothing_of_its_parents(served: Pool) -> None:
    script = (
        "import os, sys\n"
        "from broker.client import Client\n"
        "client = Client(sys.argv[1])\n"
        "client.generate('x', max_tokens=1)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    client.generate('y', max_tokens=1)\n"
        "    sys.exit(0)\n"  # the interpreter's whole ending
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "client.generate('z', max_tokens=1)\n"
    )
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, served.clients]
    done = subprocess.run(command, cwd=ROOT, timeout=30, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_async_client_works_on_uvloop(served: Pool) -> None:
    async def ask() -> list[str]:
        async with AsyncClient(served.clients) as client:
            asked = [client.generate(f"p {i}", max_tokens=6, seed=i) for i in range(200)]
            return [answer.text for answer in await asyncio.gather(*asked)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask()) == [expected(f"p {i}", i, 6) for i in range(200)]


async def test_an_async_stream_goes_on_after_the_broker_was_killed(pool: Pool) -> None:
    pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "50")
    starts, text = [], ""
    async with AsyncClient(pool.clients) as client, client.stream("story", max_tokens=150, seed=5) as stream:
        async for chunk in stream:
            starts.append(chunk.start)
            text += chunk.text
            if len(starts) == 30:
                pool.kill("broker")
                await asyncio.to_thread(pool.broker)
    assert text == expected("story", 5, 150)
    assert starts == sorted(set(starts))


async def test_both_clients_speak_over_tcp_with_keys(pool: Pool) -> None:
    ours, theirs = make_keys(pool.directory)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    pool.broker("--clients", address, "--curve-keys", str(ours))
    pool.scripted("gpu0")
    with Client(address, curve_keys=str(theirs)) as client:
        client.wait_ready(20)
        assert client.generate("x", max_tokens=3, seed=1).text == expected("x", 1, 3)
        with Client(address) as keyless, pytest.raises(Unavailable):
            keyless.models(1.0)
    async with AsyncClient(address, curve_keys=str(theirs)) as other:
        assert (await other.generate("x", max_tokens=3, seed=1)).text == expected("x", 1, 3)


async def test_an_address_on_another_host_without_keys_is_refused_by_both() -> None:
    with Client("tcp://192.0.2.1:5555") as client, pytest.raises(KeysMissing):
        client.generate("x")
    async with AsyncClient("tcp://192.0.2.1:5555") as other:
        for _ in range(2):  # refused again, not half open
            with pytest.raises(KeysMissing):
                await other.generate("x")
