"""What goes wrong in the field: models that load for minutes or not at all, full disks, logs into pipes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from examples.scripted_worker import scripted
from tests.pool import ROOT, wait_for
from tests.system.supervised import Supervised, supervised


@pytest.fixture
def place() -> Iterator[Supervised]:
    with supervised() as place:
        yield place


def scripted_beside(place: Supervised, section: str) -> None:
    """One scripted worker that serves, and another program in the group of workers."""
    place.scripted(workers=1)
    place.override(f"{section}\n[group:workers]\nprograms=worker,worker-b\npriority=200\n", "zz-second")


def test_c92_a_long_load_is_not_killed_and_running_is_not_ready(place: Supervised) -> None:
    place.override(
        f'[program:worker]\ncommand="{sys.executable}" "{ROOT}/tests/system/slow_worker.py" 12 '
        "--name %(program_name)s%(process_num)d\nstartsecs=1\n"
    )
    place.start()
    place.wait_state("workers:worker0", "RUNNING")
    first = place.pid("workers:worker0")
    wait_until_a_frontend_listens(place)
    assert not place.ready()
    shown = place.ctl("pool", "status").stdout
    assert re.search(r"workers:worker0 +LOADING +loading seconds=", shown)
    wait_for(place.ready, "the model to be loaded", 60)
    place.assert_answers()
    assert place.pid("workers:worker0") == first
    assert "NOT SERVING" not in place.ctl("pool", "status").stdout


def wait_until_a_frontend_listens(place: Supervised) -> None:
    def listens() -> bool:
        try:
            return place.http("/health")[0] == 200
        except OSError:
            return False

    wait_for(listens, "a frontend to listen")


@pytest.mark.slow
def test_c92_with_the_shipped_times_a_load_far_beyond_them_is_not_killed(place: Supervised) -> None:
    place.override(
        f'[program:worker]\ncommand="{sys.executable}" "{ROOT}/tests/system/slow_worker.py" 25 '
        "--name %(program_name)s%(process_num)d\n"
    )
    place.start()
    place.wait_state("workers:worker0", "RUNNING")
    first = place.pid("workers:worker0")
    wait_for(place.ready, "the model to be loaded", 90)
    assert place.pid("workers:worker0") == first


def test_a_worker_with_a_wrong_model_path_is_fatal_says_why_and_the_rest_serves(place: Supervised) -> None:
    scripted_beside(
        place,
        f'[program:worker-b]\ncommand="{sys.executable}" -m gpu_worker --device cpu --model /no/such/model\n'
        "startsecs=10\nstartretries=1\nredirect_stderr=true\nautorestart=true\n"
        "stdout_logfile=%(here)s/worker-b.log\nstopasgroup=true\nkillasgroup=true\n",
    )
    place.start_ready()
    place.wait_state("workers:worker-b", "FATAL", 100)
    place.assert_answers()
    tail = place.ctl("tail", "workers:worker-b").stdout
    assert "/no/such/model" in tail.strip().splitlines()[-1]
    shown = place.ctl("pool", "status").stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("workers:worker-b")]
    assert "FATAL" in line and "/no/such/model" in line


def test_c90_a_stream_of_25_seconds_survives_the_restart_of_its_worker(place: Supervised) -> None:
    # One word every 0.1 s for 25 s, longer than the worker's grace of 20 s: the rest is handed over.
    place.scripted(workers=2, flags="--steps-per-s 10 --grace-s 20")
    place.start_ready()
    wait_for(lambda: len(place.status().workers) == 2, "both workers")
    with place.client().stream("long", max_tokens=250, seed=3) as stream:
        chunks = iter(stream)
        text = next(chunks).text
        (worker,) = [w.name for w in place.status().workers if w.in_hand]
        restarted: list[subprocess.CompletedProcess[str]] = []
        thread = threading.Thread(target=lambda: restarted.append(place.ctl("restart", f"workers:{worker}")))
        thread.start()
        text += "".join(chunk.text for chunk in chunks)
        thread.join()
    assert text == "".join(scripted("long", 3, 250))
    assert stream.outcome is not None and stream.outcome.finish_reason == "length"
    assert restarted[0].returncode == 0
    assert f"stopped: {worker} (exit status 0)" in place.log("supervisord")


FLOOD = """
import os, sys, time
line = b"x" * 1023 + b"\\n"
for _ in range({kib}):
    os.write(1, line)
sys.stderr.write("flooded\\n")
sys.stderr.flush()
time.sleep(600)
"""


def test_c88_in_a_container_everything_goes_to_standard_output_and_nobody_blocks(place: Supervised) -> None:
    mib = 100
    (place.directory / "flood.py").write_text(FLOOD.format(kib=mib * 1024))
    place.override((ROOT / "deploy" / "container.conf").read_text(), "container")
    place.override(
        f'[program:flood]\ncommand="{sys.executable}" %(here)s/../flood.py\nstdout_logfile=/dev/stdout\n'
        "stdout_logfile_maxbytes=0\nredirect_stderr=true\n"
        f'[program:worker]\ncommand="{sys.executable}" "{ROOT}/examples/scripted_worker.py" --name worker0\n'
        "startsecs=1\n",
        "zz-flood",
    )
    conf = str(place.directory / "supervisord.conf")
    supervisord = subprocess.Popen(
        [str(place.directory / ".venv/bin/supervisord"), "-n", "-c", conf],
        env={**place.environment, "LOADONCE_WORKER_COUNT": "1"}, cwd="/",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert supervisord.stdout is not None
    seen, flooded, kept = 0, threading.Event(), []

    def read() -> None:
        nonlocal seen
        assert supervisord.stdout is not None
        for line in supervisord.stdout:
            seen += line.count(b"x" * 1023)
            if b"x" * 100 not in line:
                kept.append(line.decode())
            if b"flooded" in line:
                flooded.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert flooded.wait(100), "the flood didn't come to its end"
    wait_for(place.ready, "the pool")
    place.assert_answers()
    supervisord.terminate()
    assert supervisord.wait(60) == 0
    reader.join()
    supervisord.stdout.close()
    assert seen == mib * 1024
    text = "".join(kept)
    assert_nothing_is_critical(text)
    assert "Illegal seek" not in text and "Traceback" not in text
    assert any('"event": "broker_listens"' in line for line in kept)


def assert_nothing_is_critical(text: str) -> None:
    """No CRIT line but the two that supervisord says to all: of root, and of a socket without password."""
    usual = ("running as root", "running without any HTTP authentication checking")
    lines = [line for line in text.splitlines() if "CRIT" in line and not any(u in line for u in usual)]
    assert lines == []


def test_a_full_disk_under_the_logs_does_not_stop_serving(place: Supervised) -> None:
    place.scripted(workers=1)
    full = "".join(
        f"[program:{name}]\nstdout_logfile=/dev/full\nstdout_logfile_maxbytes=0\n"
        for name in ("broker", "worker", "frontend")
    )
    place.override(full, "zz-full")
    place.start_ready()
    for number in range(200):  # each leaves an access line that can't be written
        place.assert_answers(f"request {number}", seed=number, tokens=2)
    assert set(place.states().values()) <= {"RUNNING", "STARTING"}


def test_a_crash_loop_of_one_worker_ends_in_fatal_and_costs_the_others_nothing(place: Supervised) -> None:
    scripted_beside(
        place,
        f'[program:worker-b]\ncommand="{sys.executable}" -c "raise SystemExit(\'the device is on fire\')"\n'
        "startsecs=10\nstartretries=2\nredirect_stderr=true\nautorestart=true\n"
        "stdout_logfile=%(here)s/worker-b.log\n",
    )
    place.start_ready()
    slowest = 0.0
    while place.states().get("workers:worker-b") != "FATAL":
        began = time.monotonic()
        place.assert_answers()
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 5
    assert "the device is on fire" in place.ctl("pool", "status").stdout


def test_a_taken_port_ends_in_fatal_with_the_reason_while_the_broker_serves(place: Supervised) -> None:
    place.scripted(workers=1)
    place.override("[program:frontend]\nstartretries=1\nnumprocs=1\n", "zz-frontend")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", place.port))
        taken.listen()
        place.start()
        place.wait_state("frontends:frontend0", "FATAL", 60)
        assert "can't listen on" in place.ctl("tail", "frontends:frontend0").stdout
        answer = place.client().generate("raw", max_tokens=3, seed=1)
        assert answer.text == "".join(scripted("raw", 1, 3))


def test_the_log_of_a_program_is_one_json_object_a_line(place: Supervised) -> None:
    place.scripted(workers=1)
    place.start_ready()
    place.assert_answers()
    place.ctl("stop", "all")
    for name in ("broker", "frontend0", "frontend1", "exit_listener"):
        for line in place.log(name).splitlines():
            assert json.loads(line)["event"], line
