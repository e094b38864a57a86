"""Bytes that should never have come: bombs, floods, pickles, other protocols, half-open connections.

The broker must drop or refuse them, count them, stay small, and serve the others meanwhile.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import protocol as p
from tests.peers import RawClient, RawWorker
from tests.pool import Pool, wait_for

MIB = 1024 * 1024
BOMBS = {
    "an array of two thousand million": b"\xdd\x7f\xff\xff\xff",
    "a map of four thousand million": b"\xdf\xff\xff\xff\xff",
    "truncated arrays": b"\x9f\xfd\x74\xf7\xdd\x74\xff\xfd\xbd",
    "a string of four gigabytes": b"\xdb\xff\xff\xff\xff",
    "a hundred thousand nested arrays": b"\x91" * 100_000,
    "a hundred thousand nested maps": b"\x81\xa1a" * 100_000,
    "trailing bytes": p.encode(p.Ping()) + b"\x00",
    "integer keys": b"\x81\x01\x02",
    "array keys": b"\x81\x91\x01\x02",
    "an extension type": b"\xc7\x04\x05abcd",
    "invalid UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "a pickle": pickle.dumps({"type": "submit", "id": "a"}),
    "nothing but text": b"GET / HTTP/1.1",
    "another type": p.encode(p.Work("a", "b")),
    "no type": b"\x80",
    "a huge header": b"\xc4" * (p.MAX_HEADER_BYTES + 1),
}


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096 / MIB


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.fixture
def served(pool: Pool) -> Iterator[Pool]:
    """A broker on ipc and TCP with one scripted worker; at the end it must still serve."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = pool.broker("--clients", f"tcp://127.0.0.1:{port}")
    pool.port = port  # type: ignore[attr-defined]
    pool.scripted("gpu0", "--steps-per-s", "1000", "--slots", "8")
    yield pool
    assert process.poll() is None, "the broker died"
    with RawClient(address(pool)) as client:
        client.submit("last")
        assert isinstance(client.answer(), p.Done)


def address(pool: Pool) -> str:
    return f"tcp://127.0.0.1:{pool.port}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", BOMBS)
def test_c75_a_header_that_is_no_message_is_answered_and_costs_nothing(served: Pool, name: str) -> None:
    pid = served.processes["broker"].pid
    with RawClient(address(served)) as client, RawWorker(f"ipc://{served.directory}/workers") as worker:
        before, used = memory_mib(pid), cpu_s(pid)
        for _ in range(10):
            client.send(BOMBS[name], b"body")
            answer = client.answer()
            assert isinstance(answer, p.Failed) and answer.code == "protocol_error"
            worker.send(BOMBS[name])
        assert memory_mib(pid) - before < 10
        assert cpu_s(pid) - used < 10 * 0.05
        wait_for(lambda: served.status().malformed == 20, "all to be counted")
    assert served.log("broker").count('"malformed"') == 2, "one line for each peer"


@pytest.mark.parametrize("name", [name for name in BOMBS if name != "no type"])
def test_c75_c79_a_body_that_is_no_request_is_refused_by_the_worker(served: Pool, name: str) -> None:
    with RawClient(address(served)) as client:
        client.say(p.Submit(id="a"), BOMBS[name])
        answer = client.answer()
        assert isinstance(answer, p.Failed) and (answer.id, answer.code) == ("a", "invalid_request"), answer


def test_c77_a_frame_past_the_limit_costs_its_sender_the_connection(served: Pool) -> None:
    pid = served.processes["broker"].pid
    before = memory_mib(pid)
    with socket.create_connection(("127.0.0.1", served.port)) as raw:  # type: ignore[attr-defined]
        greet(raw)
        raw.sendall(b"\x02" + struct.pack(">Q", 1 << 30))  # a long frame of 1 GiB begins
        with pytest.raises(OSError):
            for _ in range(64):
                raw.sendall(bytes(MIB))
    assert memory_mib(pid) - before < 20


def greet(raw: socket.socket) -> None:
    """ZMTP 3.0, mechanism NULL: up to the point where messages may be sent."""
    raw.settimeout(10)
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\x00" + bytes(31))
    read(raw, 64)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
    read(raw, 2)


def read(raw: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        got += raw.recv(count - len(got)) or pytest.fail("the broker hung up")
    return got


def test_c77_a_hundred_thousand_frames_in_one_message_are_refused(served: Pool) -> None:
    pid = served.processes["broker"].pid
    before = memory_mib(pid)
    with RawClient(address(served)) as client:
        client.send(p.encode(p.Submit(id="a")), *[b"x"] * 100_000)
        answer = client.answer()
        assert isinstance(answer, p.Failed) and "100001 frames" in answer.message
    assert memory_mib(pid) - before < 60


def test_c77_messages_of_no_frame_and_of_one_are_answered(served: Pool) -> None:
    with RawClient(address(served)) as client:
        for frames in ([b""], [b"", b""], [b"", b"", b"x"], [b"x"]):
            client.send(*frames)
            answer = client.answer()
            assert isinstance(answer, p.Failed) and answer.code == "protocol_error", frames


def test_c77_output_before_ready_is_counted_and_reaches_nobody(served: Pool) -> None:
    with RawWorker(f"ipc://{served.directory}/workers") as worker:
        worker.say(p.Chunks(["1.1"], [1]), b"x")
        worker.finish("1.1")
        wait_for(lambda: served.status().stray == 2, "both to be counted")
        assert worker.told() == p.CancelWork(["1.1"])


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE",
        bytes(64),
        b"",
    ],
    ids=["HTTP", "TLS", "half a ZMTP greeting", "zeros", "silence"],
)
def test_other_protocols_on_the_port_hurt_nobody(served: Pool, greeting: bytes) -> None:
    peers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(50)]  # type: ignore[attr-defined]
    for raw in peers:
        raw.sendall(greeting)
    with RawClient(address(served)) as client:
        began = time.monotonic()
        for n in range(20):
            client.submit(f"r{n}")
            assert isinstance(client.answer(), p.Done)
        assert time.monotonic() - began < 5
    for raw in peers:
        raw.close()


def test_half_open_handshakes_are_closed_after_the_limit(served: Pool) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as raw:  # type: ignore[attr-defined]
        raw.settimeout(15)
        began = time.monotonic()
        while raw.recv(4096):  # our greeting never comes; the broker's does, and then the end
            pass
        assert 2 < time.monotonic() - began < 12


def test_a_flood_of_rubbish_does_not_slow_a_valid_client_beyond_its_share(served: Pool) -> None:
    pid = served.processes["broker"].pid
    with RawClient(address(served)) as client, RawClient(address(served)) as flood:
        before = memory_mib(pid)
        worst = 0.0
        for n in range(200):
            for _ in range(50):
                flood.send(b"rubbish", b"more")
            while flood.heard(0) is not None:
                pass
            began = time.monotonic()
            client.submit(f"r{n}")
            assert isinstance(client.answer(), p.Done)
            worst = max(worst, time.monotonic() - began)
        assert worst < 1.0
        assert memory_mib(pid) - before < 20
        wait_for(lambda: served.status().malformed == 10_000, "all to be counted")


def test_a_client_that_does_not_read_is_given_up_and_the_others_go_on(served: Pool) -> None:
    """Its answers would fill the broker's memory; past the high-water mark it counts as gone."""
    pid = served.processes["broker"].pid
    with RawClient(address(served)) as deaf:
        deaf.socket.rcvhwm = 1
        before = memory_mib(pid)
        for n in range(200_000):
            deaf.say(p.Ping(stamp=n))
        wait_for(lambda: served.status().unroutable > 0, "the high-water mark")
        assert memory_mib(pid) - before < 100
