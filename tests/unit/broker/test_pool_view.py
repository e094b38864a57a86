"""The tables say who serves, who doesn't, and why."""

from __future__ import annotations

import pytest

from broker import pool_view
from broker.pool_view import Process
from tests.unit.broker.statuses import model, request, status, worker


def process(name: str = "workers:worker0", state: str = "RUNNING", pid: int = 100) -> Process:
    return Process(name, state, pid, f"/logs/{name}.log")


def test_a_process_is_named_as_supervisorctl_takes_it() -> None:
    info = {"statename": "FATAL", "pid": 0, "stdout_logfile": "", "stderr_logfile": "/logs/e.log"}
    assert Process.of({"group": "workers", "name": "worker0", **info}).name == "workers:worker0"
    alone = Process.of({"group": "broker", "name": "broker", **info})
    assert (alone.name, alone.state, alone.log) == ("broker", "FATAL", "/logs/e.log")


def test_the_rate_is_what_a_worker_added_between_two_looks() -> None:
    before, after = status(worker(tokens=1000)), status(worker(tokens=1500))
    assert pool_view.token_rates(before, after, 2.0) == {"worker0": 250.0}


def test_a_worker_that_was_restarted_between_two_looks_has_no_rate() -> None:
    before, after = status(worker(tokens=1000, pid=1)), status(worker(tokens=5, pid=2))
    assert pool_view.token_rates(before, after, 2.0) == {}


def test_a_line_for_each_worker_with_load_cache_and_rate() -> None:
    shown = pool_view.workers_table(
        [worker(in_hand=3, kv_pages_used=50, kv_pages_total=200, tokens=77)], {"worker0": 12.4}
    )
    assert shown.splitlines()[1].split() == [
        "worker0", "ready", "cuda:0", "m", "3/8", "25%", "12", "77", "100", "1m01s"
    ]  # fmt: skip


def test_a_model_shows_its_queue_by_tenant() -> None:
    waiting = model(waiting=3, oldest_s=2.5, tenants={"b": 1, "": 2})
    line = pool_view.models_table(status(models=[waiting])).splitlines()[1]
    assert line.endswith("-: 2, b: 1") and "2.5s" in line


def test_requests_show_who_has_them() -> None:
    shown = pool_view.requests_table([request("a", tenant="t", worker="", state="queued")]).splitlines()
    assert shown[1].split() == ["a", "m", "t", "5", "queued", "-", "1.0s", "0", "1"]


def test_a_running_worker_that_the_broker_lacks_is_loading() -> None:
    missing = pool_view.absent([process(), process("broker", pid=5)], frozenset({7}))
    assert [p.name for p in missing] == ["workers:worker0"]
    shown = pool_view.absent_table(missing, lambda log: f"from {log}")
    assert shown.splitlines()[1].split() == [
        "workers:worker0",
        "LOADING",
        "from",
        "/logs/workers:worker0.log",
    ]


def test_whatever_does_not_run_is_named_with_its_state() -> None:
    missing = pool_view.absent([process("broker", "FATAL", 0), process()], frozenset({100}))
    assert [p.name for p in missing] == ["broker"]
    assert "FATAL" in pool_view.absent_table(missing, lambda log: "")


def test_nothing_is_said_of_workers_if_the_broker_cannot_be_asked() -> None:
    assert pool_view.absent([process()], None) == []


@pytest.mark.parametrize(
    ("seconds", "shown"), [(4.24, "4.2s"), (200, "3m20s"), (18_420, "5h07m"), (187_200, "2d04h")]
)
def test_durations_are_short(seconds: float, shown: str) -> None:
    assert pool_view.age(seconds) == shown
