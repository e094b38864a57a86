"""supervisord's events in, reports to the broker out."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from broker import exit_listener
from broker import protocol as p
from broker.errors import Unavailable
from broker.logs import Log
from tests.unit.broker.statuses import HOST, status, worker


def event(name: str, payload: str) -> bytes:
    head = f"ver:3.0 server:supervisor serial:1 pool:exit_listener poolserial:1 eventname:{name}"
    return f"{head} len:{len(payload)}\n{payload}".encode()


EXITED = "processname:worker0 groupname:workers from_state:RUNNING expected:0 pid:100"
BACKOFF = "processname:worker0 groupname:workers from_state:STARTING tries:1"


def listen(*events: bytes) -> tuple[bytes, str]:
    """What the listener answers to supervisord, and what it logs."""
    answered, logged = io.BytesIO(), io.StringIO()
    exit_listener.listen(io.BytesIO(b"".join(events)), answered, Log("exit_listener", stream=logged))
    return answered.getvalue(), logged.getvalue()


def test_only_dead_workers_of_this_host_have_departed() -> None:
    pool = status(worker("dead", pid=1), worker("alive", pid=2), worker("elsewhere", pid=1, host="there"))
    assert exit_listener.departed(pool, HOST, lambda pid: pid == 2) == [("dead", 1)]


@pytest.mark.parametrize("name, payload", [("EXITED", EXITED), ("BACKOFF", BACKOFF), ("FATAL", BACKOFF)])
def test_each_kind_of_end_is_reported(monkeypatch: pytest.MonkeyPatch, name: str, payload: str) -> None:
    reports: list[Log] = []
    monkeypatch.setattr(exit_listener, "report", reports.append)
    answered, logged = listen(event(f"PROCESS_STATE_{name}", payload))
    assert len(reports) == 1
    assert answered == b"READY\nRESULT 2\nOKREADY\n"
    assert f'"state": "{name}"' in logged and "workers:worker0" in logged


def test_other_events_are_answered_and_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_listener, "report", lambda log: pytest.fail("reported"))
    answered, _ = listen(event("PROCESS_STATE_RUNNING", EXITED), event("TICK_5", "when:1"))
    assert answered.count(b"RESULT 2\nOK") == 2


def test_the_broker_is_told_of_each_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[p.AdminMessage] = []

    def ask(message: p.AdminMessage, **_: object) -> tuple[str, list[bytes]]:
        told.append(message)
        return "done", []

    monkeypatch.setattr(
        exit_listener, "ask_status", lambda **_: status(worker("w1", pid=11), worker("w2", pid=12))
    )
    monkeypatch.setattr(exit_listener, "ask", ask)
    monkeypatch.setattr("socket.gethostname", lambda: HOST)
    monkeypatch.setattr(exit_listener, "process_lives", lambda pid: pid == 12)
    exit_listener.report(Log("exit_listener", stream=io.StringIO()))
    assert told == [p.AdminGone(pid=11, worker="w1")]


def test_a_broker_that_is_away_is_logged_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(**_: object) -> None:
        raise Unavailable("no broker answers")

    monkeypatch.setattr(exit_listener, "ask_status", away)
    answered, logged = listen(event("PROCESS_STATE_EXITED", EXITED))
    assert answered.endswith(b"OKREADY\n")
    assert "broker_not_told" in logged and "no broker answers" in logged


@pytest.mark.parametrize(
    "where", ["tcp://127.0.0.1", "gopher://x", "ipc://" + "x" * 200, "tcp://192.0.2.1:5"]
)
def test_an_address_that_is_none_is_logged_and_no_more(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setenv("LOADONCE_ADMIN", where)
    answered, logged = listen(event("PROCESS_STATE_EXITED", EXITED), event("TICK_5", "when:1"))
    assert answered.count(b"RESULT 2\nOK") == 2, "the listener goes on"
    assert "broker_not_told" in logged


def test_a_program_that_crashes_again_and_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_listener, "report", lambda log: None)
    other = EXITED.replace("worker0", "worker1")
    wanted = EXITED.replace("expected:0", "expected:1")
    quiet = [event("PROCESS_STATE_EXITED", p) for p in (EXITED, other, wanted, EXITED, EXITED, other)]
    assert "crash_loop" not in listen(*quiet)[1]
    loud = listen(*quiet, event("PROCESS_STATE_EXITED", EXITED))[1]
    (line,) = [line for line in loud.splitlines() if "crash_loop" in line]
    assert "workers:worker0" in line


def test_crashes_far_apart_are_no_loop() -> None:
    crashes = exit_listener.Crashes()
    assert [crashes.count("a", n * exit_listener.LOOP_S) for n in range(6)] == [None] * 6
    assert [crashes.count("b", 60.0 * n) for n in range(4)] == [None, None, None, 180.0]


def test_a_process_lives_until_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert not exit_listener.process_lives(child.pid)
    assert exit_listener.process_lives(os.getpid())


def test_started_by_hand_it_says_who_should_start_it() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUPERVISOR")}
    command = [sys.executable, "-m", "broker.exit_listener"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "supervisord starts this one" in done.stderr and len(done.stderr.splitlines()) == 1
