"""A client written from docs/protocol.md alone, with pyzmq and msgpack: every promise of that page."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from examples import raw_client
from examples.scripted_worker import scripted
from tests.pool import ROOT, Pool, wait_for


class Raw:
    """A socket that speaks maps."""

    def __init__(self, address: str, kind: int, *, delimiter: bool = False, heartbeat: bool = False) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        if heartbeat:
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, 100)
        self.socket.connect(address)
        self.delimiter = delimiter

    def send(self, *maps: dict[str, Any] | bytes) -> None:
        frames = [m if isinstance(m, bytes) else msgpack.packb(m) for m in maps]
        self.socket.send_multipart([b"", *frames] if self.delimiter else frames)

    def receive(self, timeout_s: float = 10) -> list[Any]:
        assert self.socket.poll(int(1000 * timeout_s)), "no answer"
        frames = self.socket.recv_multipart()
        if self.delimiter:
            assert frames[0] == b"", "answers to a message with a delimiter have one"
            frames = frames[1:]
        return [msgpack.unpackb(frame) for frame in frames]

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def served(pool: Pool) -> Pool:
    pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "200")
    return pool


FORMS = {
    "REQ": (zmq.REQ, False),
    "DEALER": (zmq.DEALER, False),
    "DEALER with delimiter": (zmq.DEALER, True),
}


@pytest.fixture(params=FORMS)
def raw(served: Pool, request: pytest.FixtureRequest) -> Iterator[Raw]:
    kind, delimiter = FORMS[request.param]
    made = Raw(served.clients, kind, delimiter=delimiter, heartbeat=True)
    yield made
    made.close()


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk.get("text", "") for chunk in chunks)


def test_c80_every_form_of_client_gets_its_answer(raw: Raw) -> None:
    for turn in range(3):
        raw.send(
            {"type": "submit", "id": f"r{turn}"},
            {"prompt": "hello there", "params": {"max_tokens": 4, "seed": turn}},
        )
        header, outcome, *chunks = raw.receive()
        assert (header["type"], header["id"], header["worker"]) == ("done", f"r{turn}", "gpu0")
        assert outcome["usage"] == {"prompt_tokens": 2, "completion_tokens": 4}
        assert text_of(chunks) == "".join(scripted("hello there", turn, 4))


def test_c80_a_malformed_message_is_answered_not_ignored(raw: Raw) -> None:
    raw.send(b"\xc1 this is no msgpack")
    (header,) = raw.receive()
    assert (header["type"], header["code"]) == ("error", "protocol_error")
    raw.send({"type": "models"})
    assert raw.receive()[0]["models"][0]["name"] == "scripted"


def test_another_version_is_refused_with_a_reason(raw: Raw) -> None:
    raw.send({"type": "submit", "id": "v", "version": 2}, {"prompt": "x"})
    (header,) = raw.receive()
    assert (header["code"], header["id"]) == ("protocol_version", "v")
    assert "2" in header["message"]


def test_an_unknown_field_of_a_request_is_named(raw: Raw) -> None:
    raw.send({"type": "submit", "id": "u"}, {"prompt": "x", "params": {"temprature": 1}})
    (header,) = raw.receive()
    assert (header["code"], header["param"]) == ("invalid_request", "temprature")


def test_a_submit_without_a_request_is_refused(raw: Raw) -> None:
    raw.send({"type": "submit", "id": "u"})
    (header,) = raw.receive()
    assert (header["type"], header["code"], header["id"]) == ("error", "invalid_request", "u")


def test_a_stream_comes_in_chunks_in_order(served: Pool) -> None:
    raw = Raw(served.clients, zmq.DEALER)
    request = {"prompt": "go", "params": {"max_tokens": 10, "seed": 1}}
    raw.send({"type": "submit", "id": "s", "stream": True}, request)
    chunks = []
    while True:
        header, *body = raw.receive()
        if header["type"] == "done":
            break
        assert header == {"type": "chunk", "ids": ["s"]}
        chunks += body
    raw.close()
    assert [chunk.get("start", 0) for chunk in chunks] == list(range(10))
    assert text_of(chunks) == "".join(scripted("go", 1, 10))


def test_a_cancelled_request_ends_once(served: Pool) -> None:
    raw = Raw(served.clients, zmq.DEALER)
    raw.send({"type": "submit", "id": "c"}, {"prompt": "go", "params": {"max_tokens": 100_000}})
    wait_for(lambda: served.status().in_flight == 1, "the request")
    raw.send({"type": "cancel", "id": "c"})
    (header,) = raw.receive()
    assert (header["type"], header["code"], header["id"]) == ("error", "cancelled", "c")
    raw.send({"type": "cancel", "id": "c"})
    raw.send({"type": "ping", "pending": ["c"], "stamp": 3})
    (pong,) = raw.receive()
    raw.close()
    assert (pong["type"], pong["unknown"], pong["stamp"]) == ("pong", ["c"], 3)


def test_submitting_an_id_again_replaces_it_from_the_chunks_sent_along(served: Pool) -> None:
    raw = Raw(served.clients, zmq.DEALER)
    request = {"prompt": "again", "params": {"max_tokens": 12, "seed": 2}}
    words = scripted("again", 2, 12)
    had = {"token_ids": [1, 2, 3, 4], "text": "".join(words[:4])}
    raw.send({"type": "submit", "id": "a", "stream": True}, request, had)
    texts, starts = [], []
    while True:
        header, *body = raw.receive()
        if header["type"] == "done":
            break
        texts.append(text_of(body))
        starts += [chunk.get("start", 0) for chunk in body]
    raw.close()
    assert starts == list(range(4, 12))
    assert "".join(texts) == "".join(words[4:])


def test_two_clients_may_use_the_same_id(served: Pool) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        raw = Raw(served.clients, zmq.REQ)
        raw.send(
            {"type": "submit", "id": "1"}, {"prompt": f"p{number}", "params": {"max_tokens": 5, "seed": 0}}
        )
        answers[number] = text_of(raw.receive()[2:])
        raw.close()

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: "".join(scripted(f"p{n}", 0, 5)) for n in range(8)}


def test_the_example_asks_and_streams(served: Pool) -> None:
    request = {"prompt": "hello", "params": {"max_tokens": 5, "seed": 4}}
    expected = "".join(scripted("hello", 4, 5))
    assert raw_client.ask(served.clients, dict(request)) == expected
    assert "".join(raw_client.stream(served.clients, dict(request))) == expected
    with pytest.raises(raw_client.Refused, match="model_not_found|invalid_request"):
        raw_client.ask(served.clients, {"prompt": "x", "params": {"nonsense": 1}})


def test_the_examples_stream_survives_the_broker(pool: Pool) -> None:
    pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "40")
    request = {"prompt": "tale", "params": {"max_tokens": 120, "seed": 6}}
    texts = []
    for text in raw_client.stream(pool.clients, request):
        texts.append(text)
        if len(texts) == 20:
            pool.kill("broker")
            pool.broker()
    assert "".join(texts) == "".join(scripted("tale", 6, 120))


def test_the_example_runs_as_a_program(served: Pool) -> None:
    command = [
        sys.executable,
        "examples/raw_client.py",
        "--address",
        served.clients,
        "--max-tokens",
        "3",
        "hi",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and len(done.stdout.split()) == 3, done.stderr
