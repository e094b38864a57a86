"""A frontend's life: start, refuse to start, share a port, lose its worker, stop."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from http_frontend import keys
from http_frontend.__main__ import EXIT_ADDRESS, EXIT_FILE, EXIT_UNSAFE, EXIT_USAGE
from tests.integration.http_serving import HttpPool, free_port, http_pool
from tests.pool import ROOT, Pool, wait_for

HI: list[Any] = [{"role": "user", "content": "hi"}]


def run_frontend(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a frontend that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "http_frontend", *flags],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=20,
    )  # fmt: skip


def assert_one_line(ended: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert ended.returncode == code, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert_one_line(run_frontend("--port", port, LOADONCE_RUN_DIR=str(tmp_path)), EXIT_ADDRESS, port)


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (("--port", "x"), EXIT_USAGE, "--port"),
        (("--prot", "1"), EXIT_USAGE, "--prot"),
        (("--max-n", "0"), EXIT_USAGE, "--max-n"),
        (("--host", "0.0.0.0"), EXIT_UNSAFE, "--api-keys"),  # noqa: S104
        (("--host", "192.0.2.1", "--api-keys", "KEYS"), EXIT_ADDRESS, "192.0.2.1"),
        (("--api-keys", "missing.json"), EXIT_FILE, "missing.json"),
        (("--tls-cert", "missing.pem"), EXIT_FILE, "missing.pem"),
        (("--clients", "tcp://192.0.2.1:5555"), EXIT_USAGE, "--curve-keys"),
        (("--clients", "tcp://127.0.0.1"), EXIT_USAGE, "clients"),
        (("--clients", "off"), EXIT_USAGE, "clients"),
        (("--admin", "tcp://192.0.2.1:5555"), EXIT_USAGE, "--curve-keys"),
        (("--admin", "tcp://127.0.0.1"), EXIT_USAGE, "admin"),
        (("--run-dir", "/tmp/" + "x" * 120), EXIT_USAGE, "LOADONCE_RUN_DIR"),  # noqa: S108
    ],
)
def test_a_wrong_setting_is_one_clear_line(
    tmp_path: Path, flags: tuple[str, ...], code: int, word: str
) -> None:
    (tmp_path / "keys").write_text("[]")
    chosen = [str(tmp_path / "keys") if flag == "KEYS" else flag for flag in flags]
    port = () if "--port" in chosen or "--prot" in chosen else ("--port", str(free_port()))
    assert_one_line(run_frontend(*chosen, *port, LOADONCE_RUN_DIR=str(tmp_path)), code, word)


def test_it_listens_within_a_second_and_loads_no_torch(pool: Pool) -> None:
    pool.broker()
    served = HttpPool(pool, free_port())
    began = time.monotonic()
    served.frontend()
    taken = time.monotonic() - began
    assert taken < 2.0  # the goal of 1 s is measured by the benchmark, alone on the machine
    maps = Path(f"/proc/{pool.processes['http'].pid}/maps").read_text()
    assert "torch" not in maps
    assert served.get("/health")[0] == 200
    assert served.get("/ready")[0] == 503
    assert pool.stop("http") == 0


def test_frontends_share_a_port_and_one_may_leave() -> None:
    with http_pool() as served:
        served.frontend(name="http2")
        pids = {process.pid for name, process in served.pool.processes.items() if name.startswith("http")}

        def pids_seen() -> bool:
            text = served.get("/metrics")[1]
            return all(f'loadonce_http_connections{{frontend="{pid}"}}' in text for pid in pids)

        wait_for(pids_seen, "both frontends in one scrape")
        assert served.pool.stop("http") == 0
        for _ in range(20):
            assert served.post("/generation", {"prompt": "x", "max_new_tokens": 1})[0] == 200


def test_two_pools_dont_share_a_port_by_mistake(tmp_path: Path) -> None:
    with http_pool() as served:
        ended = run_frontend("--port", str(served.port), LOADONCE_RUN_DIR=str(tmp_path))
        assert_one_line(ended, EXIT_ADDRESS, str(served.port), "another pool")


def test_sigterm_finishes_what_is_in_hand(tmp_path: Path) -> None:
    with http_pool(worker=("--steps-per-s", "20")) as served, served.openai(max_retries=0) as client:
        stream = client.chat.completions.create(model="scripted", messages=HI, max_tokens=30, stream=True)
        first = next(iter(stream))
        assert first.choices
        process = served.pool.processes["http"]
        process.terminate()
        wait_for(lambda: served.get("/ready")[0] == 503, "/ready to say no", 2.0)
        assert served.get("/health")[0] == 200
        assert len(list(stream)) == 31  # 30 words and the end
        assert process.wait(10) == 0


def test_sigterm_cuts_off_at_the_grace() -> None:
    with http_pool("--drain-grace-s", "0.4", worker=("--steps-per-s", "20")) as served:
        answered: list[Any] = []

        def ask() -> None:
            try:
                answered.append(served.post("/generation", {"prompt": "x", "max_new_tokens": 400}))
            except OSError as problem:
                answered.append(problem)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: served.running() == 1, "the request to run")
        assert served.pool.stop("http", 5.0) == 0
        asking.join()
        assert isinstance(answered[0], OSError)
        wait_for(lambda: served.running() == 0, "the worker to be free", 2.0)


def test_c30_a_dead_worker_shows_at_ready_and_requests_dont_hang() -> None:
    with http_pool(broker=("--no-worker-wait-s", "0.5")) as served:
        served.pool.kill("gpu0")
        wait_for(lambda: served.get("/ready")[0] == 503, "/ready to say no", 6.0)
        assert served.get("/health")[0] == 200
        began = time.monotonic()
        request = urllib.request.Request(
            served.url + "/v1/chat/completions",
            data=json.dumps({"messages": HI}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        with refused.value as answer:
            assert answer.code == 503
            assert answer.headers["Retry-After"]
            assert json.loads(answer.read())["error"]["code"] == "unavailable"
        assert time.monotonic() - began < 3
        served.pool.scripted("gpu1")
        served.wait_ready()
        assert served.post("/generation", {"prompt": "x"})[0] == 200


def test_a_killed_worker_in_the_middle_of_a_stream_isnt_noticed() -> None:
    with http_pool(worker=("--steps-per-s", "20")) as served, served.openai(max_retries=0) as client:
        served.pool.scripted("gpu1", "--steps-per-s", "20")
        fields: dict[str, Any] = {"model": "scripted", "messages": HI, "max_tokens": 40, "seed": 4}
        undisturbed = client.chat.completions.create(**fields).choices[0].message.content
        text = ""
        for count, chunk in enumerate(client.chat.completions.create(**fields, stream=True)):
            text += chunk.choices[0].delta.content or ""
            if count == 8:
                busy = next(w.name for w in served.pool.status().workers if w.in_hand)
                served.pool.kill(busy)
        assert text == undisturbed


def test_a_killed_broker_in_the_middle_of_a_stream_isnt_noticed() -> None:
    with http_pool(worker=("--steps-per-s", "20")) as served, served.openai(max_retries=0) as client:
        fields: dict[str, Any] = {"model": "scripted", "messages": HI, "max_tokens": 60, "seed": 4}
        undisturbed = client.chat.completions.create(**fields).choices[0].message.content
        text = ""
        for count, chunk in enumerate(client.chat.completions.create(**fields, stream=True)):
            text += chunk.choices[0].delta.content or ""
            if count == 8:
                served.pool.kill("broker")
                served.pool.broker()
        assert text == undisturbed


def test_a_deadline_is_504() -> None:
    with http_pool("--deadline-s", "0.5", worker=("--steps-per-s", "10")) as served:
        status, answer = served.post("/v1/completions", {"prompt": "x", "max_tokens": 1000})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        wait_for(lambda: served.running() == 0, "the worker to be free", 2.0)


def test_a_full_queue_is_429_with_a_hint() -> None:
    slow = ("--steps-per-s", "5", "--slots", "1")
    with http_pool(worker=slow, broker=("--queue-limit", "2")) as served:
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(served.post("/generation", {"prompt": "x", "max_new_tokens": 5})[0])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses.count(429) >= 1
        assert statuses.count(200) >= 1
        assert set(statuses) == {200, 429}


def slow_reader(port: int) -> socket.socket:
    """Ask for a long stream and read nothing of it."""
    body = json.dumps({"messages": HI, "max_tokens": 50_000, "stream": True}).encode()
    reader = socket.create_connection(("127.0.0.1", port))
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    reader.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return reader


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_c28_fifty_slow_readers_cost_little_and_nobody_else_notices() -> None:
    fast = ("--steps-per-s", "400", "--slots", "64", "--words-per-step", "4")
    with http_pool(worker=fast) as served, contextlib.ExitStack() as ends:
        pid = served.pool.processes["http"].pid
        before = resident_bytes(pid)
        readers = [slow_reader(served.port) for _ in range(50)]
        for reader in readers:
            ends.callback(reader.close)
        most, until = 0, time.monotonic() + 60
        while served.pool.log("http").count("slow reader dropped") < 50:
            assert time.monotonic() < until, "slow readers stay"
            most = max(most, resident_bytes(pid))
            began = time.monotonic()
            assert served.get("/health")[0] == 200
            assert time.monotonic() - began < 5
        assert most - before < 100 * 1024 * 1024
        wait_for(lambda: served.running() == 0, "the worker to be free", 5.0)


def test_keys_and_tls_at_work(tmp_path: Path) -> None:
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", tmp_path / "key.pem",
         "-out", tmp_path / "cert.pem"],
        capture_output=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    path = tmp_path / "keys.json"
    key = subprocess.run(
        [sys.executable, "-m", "http_frontend.keys", "--file", path, "--name", "alice"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    tls = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with http_pool() as served:
        served.port = free_port()
        served.frontend("--host", "localhost", "--api-keys", str(path), *tls, name="https")
        trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))

        def status(key: str) -> int:
            request = urllib.request.Request(
                f"https://localhost:{served.port}/v1/models", headers={"Authorization": f"Bearer {key}"}
            )
            try:
                with urllib.request.urlopen(request, context=trust, timeout=10) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as problem:
                with problem:
                    return problem.code

        assert status(key) == 200
        assert status("wrong") == 401
        keys.add(path, keys.KeyEntry(name="bob", sha256=keys.digest_of("bobs").hex()))
        wait_for(lambda: status("bobs") == 200, "the new key", 5.0)


def test_the_access_log_is_one_json_line_for_each_request() -> None:
    with http_pool() as served:
        served.post("/generation", {"prompt": "secret words"}, **{"X-Request-Id": "mine-9"})
        wait_for(lambda: "mine-9" in served.pool.log("http"), "the line")
        lines = [json.loads(line) for line in served.pool.log("http").splitlines()]
        (line,) = [line for line in lines if line.get("request_id") == "mine-9"]
        assert (line["status"], line["model"], line["path"]) == (200, "scripted", "/generation")
        assert "secret" not in served.pool.log("http")
