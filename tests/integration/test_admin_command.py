"""`python -m broker.admin` as an operator uses it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.peers import raw
from tests.pool import ROOT, Pool, wait_for


def admin(pool: Pool, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "broker.admin", *words]
    return subprocess.run(
        command, cwd=ROOT, env=pool.environment, capture_output=True, text=True, timeout=30, check=False
    )  # fmt: skip


def test_status_is_a_table_for_people_and_json_for_machines(pool: Pool) -> None:
    pool.broker()
    worker = pool.scripted("gpu0", "--slots", "3")
    shown = admin(pool, "status")
    assert shown.returncode == 0
    for word in ("WORKER", "gpu0", "0/3", str(worker.pid), "MODEL", "scripted", "session"):
        assert word in shown.stdout, shown.stdout
    (found,) = json.loads(admin(pool, "status", "--json").stdout)["workers"]
    assert (found["name"], found["slots"]) == ("gpu0", 3)


def test_drain_and_resume_stop_and_start_new_work(pool: Pool) -> None:
    pool.broker()
    pool.scripted("gpu0", "--steps-per-s", "500")
    assert admin(pool, "drain", "gpu0").returncode == 0
    with raw(pool.directory) as (client, _):
        client.submit("a")
        wait_for(lambda: pool.status().models[0].waiting == 1, "it to wait")
        assert admin(pool, "resume", "gpu0").returncode == 0
        wait_for(lambda: pool.status().in_flight == 0, "its end")


def test_cancel_ends_a_request_for_its_client(pool: Pool) -> None:
    pool.broker()
    with raw(pool.directory) as (client, worker):
        worker.register()
        client.submit("a")
        worker.work()
        assert admin(pool, "cancel", "a").stdout.strip() == "cancelled 1"
        assert getattr(client.answer(), "code", "") == "cancelled"


def test_metrics_are_prometheus_text(pool: Pool) -> None:
    pool.broker()
    assert "loadonce_broker_in_flight 0.0" in admin(pool, "metrics").stdout


def test_a_refusal_is_one_line_and_exit_code_1(pool: Pool) -> None:
    pool.broker()
    for words in (("drain", "gpu9"), ("resume", "gpu9"), ("cancel", "gpu9")):
        done = admin(pool, *words)
        assert done.returncode == 1 and "gpu9" in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_a_broker_it_says_so_with_exit_code_3(pool: Pool) -> None:
    done = admin(pool, "status")
    assert done.returncode == 3 and str(pool.directory) in done.stderr and len(done.stderr.splitlines()) == 1
