"""Start, stop, restart and tail each program; kill what can be killed; nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.pool import wait_for
from tests.system.supervised import Supervised, gone, supervised

PROGRAMS = ["broker", "workers:worker0", "workers:worker1", "frontends:frontend0", "frontends:frontend1"]


@pytest.fixture(scope="module")
def running() -> Iterator[Supervised]:
    """A pool that the tests of this file share, each leaving it serving."""
    with supervised() as place:
        place.scripted()
        place.start_ready()
        wait_for(lambda: len(place.status().workers) == 2, "both workers")
        yield place


@pytest.fixture
def fresh() -> Iterator[Supervised]:
    with supervised() as place:
        place.scripted()
        yield place


def test_status_shows_every_program_running(running: Supervised) -> None:
    wait_for(lambda: set(running.states().values()) == {"RUNNING"}, "every program")
    assert set(running.states()) == {*PROGRAMS, "exit_listener"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_after_a_restart_the_answer_is_the_same(running: Supervised, program: str) -> None:
    running.assert_answers()
    done = running.ctl("restart", program)
    assert f"{program.split(':')[-1]}: started" in done.stdout and done.returncode == 0
    wait_for(running.ready, "the pool")
    running.assert_answers()


@pytest.mark.parametrize("program", PROGRAMS)
def test_stop_and_start(running: Supervised, program: str) -> None:
    assert running.ctl("stop", program).returncode == 0
    assert running.states()[program] == "STOPPED"
    if program not in ("broker",):
        running.assert_answers()  # the other one of its kind serves
    assert running.ctl("start", program).returncode == 0
    wait_for(running.ready, "the pool")
    running.assert_answers()


def test_each_stops_with_exit_code_0(running: Supervised) -> None:
    for program in PROGRAMS:
        running.ctl("restart", program)
    log = running.log("supervisord")
    assert "stopped: broker (exit status 0)" in log
    for number in (0, 1):
        assert f"stopped: worker{number} (exit status 0)" in log
        assert f"stopped: frontend{number} (exit status 0)" in log
    wait_for(running.ready, "the pool")


@pytest.mark.parametrize("program", ["broker", "frontends:frontend0"])
def test_tail_shows_what_a_program_wrote(running: Supervised, program: str) -> None:
    assert '"event"' in running.ctl("tail", program).stdout


def test_a_killed_worker_comes_back_and_answers(running: Supervised) -> None:
    wait_for(lambda: running.registered("worker0"), "worker0")
    before = running.pid("workers:worker0")
    os.kill(before, signal.SIGKILL)
    running.assert_answers()
    wait_for(lambda: running.registered("worker0", not_pid=before), "the new worker0")
    running.assert_answers()


def test_a_killed_broker_and_a_killed_frontend_come_back(running: Supervised) -> None:
    for program in ("broker", "frontends:frontend1"):
        before = running.pid(program)
        os.kill(before, signal.SIGKILL)
        wait_for(lambda b=before, p=program: running.pid(p) not in (0, b), f"{program}")  # type: ignore[misc]
    wait_for(running.ready, "the pool")
    running.assert_answers()


def test_stop_all_leaves_no_process_of_ours_and_no_socket(fresh: Supervised) -> None:
    fresh.start_ready()
    assert fresh.ctl("stop", "all").returncode == 0
    assert set(fresh.states().values()) == {"STOPPED"}
    assert list(fresh.processes()) == [fresh.supervisor_pid]
    assert [path for path in (fresh.directory / "s").iterdir() if path.is_socket()] == []
    with pytest.raises(OSError):
        fresh.http("/health")
    assert fresh.ctl("start", "all").returncode == 0
    wait_for(fresh.ready, "the pool")
    fresh.assert_answers()


def test_shutdown_ends_everything(fresh: Supervised) -> None:
    fresh.start_ready()
    assert fresh.ctl("shutdown").returncode == 0
    fresh.wait_gone()
    sockets = [path for path in fresh.directory.rglob("*") if path.is_socket()]
    assert sockets == []


def test_nothing_outlives_a_killed_supervisord_and_the_next_one_starts(fresh: Supervised) -> None:
    fresh.start_ready()
    os.kill(fresh.supervisor_pid, signal.SIGKILL)
    fresh.wait_gone()
    assert gone(fresh)
    fresh.start_ready()
    fresh.assert_answers()


def test_a_supervisord_killed_while_its_processes_still_start_leaves_none_of_them(fresh: Supervised) -> None:
    fresh.start()
    os.kill(fresh.supervisor_pid, signal.SIGKILL)
    fresh.wait_gone()


def test_c82_a_shell_wrapper_and_its_helper_end_with_the_worker(fresh: Supervised) -> None:
    fresh.scripted(workers=1)
    conf = fresh.directory / "run" / "test.conf"
    text = conf.read_text()
    command = next(line for line in text.splitlines() if line.startswith("command="))[len("command=") :]
    quoted = command.replace('"', "'")
    conf.write_text(text.replace(command, f'sh -c "sleep 1000 & sleep 1001 & {quoted}"'))
    fresh.start_ready()
    helpers = [pid for pid, line in fresh.processes().items() if line.startswith("sleep 100")]
    assert len(helpers) == 2
    assert fresh.ctl("stop", "all").returncode == 0
    wait_for(lambda: list(fresh.processes()) == [fresh.supervisor_pid], "the helpers to end")


def test_pool_verbs_work_in_the_real_supervisorctl(running: Supervised) -> None:
    wait_for(lambda: len(running.status().workers) == 2, "both workers")
    shown = running.ctl("pool", "status")
    assert shown.returncode == 0 and "worker0" in shown.stdout and "NOT SERVING" not in shown.stdout
    assert running.ctl("pool", "drain", "worker0").stdout.startswith("worker0 takes no new work")
    assert {w.name: w.state for w in running.status().workers}["worker0"] == "draining"
    running.assert_answers()
    assert running.ctl("pool", "resume", "worker0").returncode == 0
    refused = running.ctl("pool", "drain", "nobody")
    assert refused.returncode == 1 and "nobody" in refused.stdout
    assert "pool restart" in running.ctl("help", "pool").stdout


def test_pool_cancel_ends_a_request_with_its_error(running: Supervised) -> None:
    client = running.client()
    with client.stream("@say=" + "x" * 5000, max_tokens=5000) as stream:
        next(iter(stream))
        assert stream.id in running.ctl("pool", "requests").stdout
        assert running.ctl("pool", "cancel", stream.id).returncode == 0
        with pytest.raises(Exception, match="cancel"):
            for _ in stream:
                pass


def test_pool_status_without_a_broker_says_so_and_shows_supervisord_s_side(running: Supervised) -> None:
    running.ctl("stop", "broker")
    try:
        shown = running.ctl("pool", "status")
        assert shown.returncode == 7
        assert "broker" in shown.stdout and "STOPPED" in shown.stdout and "no broker answers" in shown.stdout
    finally:
        running.ctl("start", "broker")
    wait_for(running.ready, "the pool")


def test_a_listener_that_finds_no_broker_goes_on(running: Supervised) -> None:
    running.ctl("stop", "broker")
    running.ctl("restart", "workers:worker0")
    wait_for(lambda: "broker_not_told" in running.log("exit_listener"), "the listener to give up")
    running.ctl("start", "broker")
    wait_for(lambda: running.registered("worker0"), "worker0")
    before = running.pid("workers:worker0")
    with contextlib.suppress(ProcessLookupError):
        os.kill(before, signal.SIGKILL)
    wait_for(lambda: running.registered("worker0", not_pid=before), "the new worker0", 20)
    assert running.states()["exit_listener"] == "RUNNING"
