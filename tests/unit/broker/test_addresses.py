"""Actors of one user find each other without a setting, and nobody else may listen in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker import addresses
from broker.settings import BrokerSettings
from gpu_worker.settings import WorkerSettings


def test_the_run_directory_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOADONCE_RUN_DIR", str(tmp_path))
    assert addresses.address("clients") == f"ipc://{tmp_path}/clients"
    monkeypatch.delenv("LOADONCE_RUN_DIR")
    assert addresses.run_dir() == Path(f"/tmp/loadonce-{os.getuid()}")


def test_a_given_address_is_taken_as_it_is() -> None:
    assert addresses.address("clients", "tcp://127.0.0.1:5555") == "tcp://127.0.0.1:5555"


def test_a_new_run_directory_is_private(tmp_path: Path) -> None:
    made = addresses.make_run_dir(str(tmp_path / "run"))
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_run_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(OSError, match="written by others"):
        addresses.make_run_dir(str(tmp_path / "run"))


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LOADONCE_RUN_DIR"):
        addresses.address("clients", directory=str(tmp_path / ("x" * 120)))


def test_an_address_from_the_environment_reaches_clients_as_it_reaches_the_actors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOADONCE_CLIENTS", "tcp://127.0.0.1:5555")
    assert addresses.address("clients") == "tcp://127.0.0.1:5555"
    assert addresses.address("clients", "tcp://127.0.0.1:6666") == "tcp://127.0.0.1:6666"
    assert addresses.address("admin", directory=str(tmp_path)) == f"ipc://{tmp_path}/admin"


def test_the_brokers_stall_never_forestalls_a_workers_own_watchdog() -> None:
    assert BrokerSettings().stall_s > WorkerSettings().step_timeout_s
