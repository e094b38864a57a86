"""The shipped supervisord.conf, read by supervisor's own parser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from supervisor.options import ServerOptions

from gpu_worker.settings import WorkerSettings
from http_frontend.settings import FrontendSettings
from tests.pool import ROOT, wait_for
from tests.system.supervised import Supervised, supervised

CONF = ROOT / "supervisord.conf"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the conf and an empty run/."""
    (tmp_path / "run").mkdir()
    shutil.copy(CONF, tmp_path)
    return tmp_path


def parse(directory: Path, override: str = "") -> dict[str, Any]:
    """The processes that supervisord would run, by name."""
    if override:
        (directory / "run" / "test.conf").write_text(override)
    options = ServerOptions()
    options.realize(["-c", str(directory / "supervisord.conf")])
    return {
        process.name: process for group in options.process_group_configs for process in group.process_configs
    }


def test_it_names_every_program_once(place: Path) -> None:
    found = parse(place)
    assert set(found) == {"broker", "worker0", "frontend0", "frontend1", "exit_listener"}


def test_c86_nothing_has_to_be_set_in_the_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    assert len(parse(place)) == 5
    assert "%(ENV_" not in CONF.read_text()


def test_c86_a_missing_variable_names_itself(place: Path) -> None:
    override = "[program:worker]\nenvironment=LOADONCE_MODEL=%(ENV_WHERE_IS_MY_MODEL)s\n"
    said: list[str] = []

    def usage(self: ServerOptions, text: str) -> NoReturn:
        said.append(text)
        sys.exit(2)

    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerOptions, "usage", usage)
        parse(place, override)
    assert "ENV_WHERE_IS_MY_MODEL" in said[0] and "program:worker" in said[0]


@pytest.mark.parametrize("start", [0, 2])
def test_c87_each_worker_has_its_own_device_name_and_log(place: Path, start: int) -> None:
    command = r"\g<0> --device %(process_num)d"
    text = re.sub(r"^command=.*gpu_worker.*$", command, CONF.read_text(), flags=re.MULTILINE)
    (place / "supervisord.conf").write_text(text)
    found = parse(place, f"[program:worker]\nnumprocs=4\nnumprocs_start={start}\n")
    workers = {name: process for name, process in found.items() if name.startswith("worker")}
    assert list(workers) == [f"worker{number}" for number in range(start, start + 4)]
    for number, (name, process) in enumerate(workers.items(), start=start):
        assert process.command.endswith(f"--name {name} --device {number}")
        assert process.stdout_logfile == str(place / "run" / f"{name}.log")


def test_c87_the_number_of_workers_is_one_edit(place: Path) -> None:
    text = CONF.read_text()
    (place / "supervisord.conf").write_text(text.replace("[program:worker]", "[program:worker]", 1).replace(
        "numprocs=1\n", "numprocs=8\n", 1))  # fmt: skip
    assert len([name for name in parse(place) if name.startswith("worker")]) == 8


def test_c90_every_wait_is_longer_than_the_drain_that_it_waits_for(place: Path) -> None:
    found = parse(place)
    assert found["worker0"].stopwaitsecs > WorkerSettings().drain_grace_s + 5
    assert found["frontend0"].stopwaitsecs > FrontendSettings().drain_grace_s + 5


def test_every_program_is_stopped_and_killed_with_its_group_and_starts_again(place: Path) -> None:
    for name, process in parse(place).items():
        assert process.stopasgroup and process.killasgroup, name
        assert process.stopsignal == 15 and process.autorestart, name
        assert not re.match(r"^\S*(sh|bash|env)\s", process.command), f"{name} is wrapped in a shell"


def test_every_log_is_bounded_and_is_one_process_s_own(place: Path) -> None:
    logs = []
    for name, process in parse(place).items():
        log, bytes_, backups = (
            (process.stdout_logfile, process.stdout_logfile_maxbytes, process.stdout_logfile_backups)
            if process.stdout_logfile
            else (process.stderr_logfile, process.stderr_logfile_maxbytes, process.stderr_logfile_backups)
        )
        assert 0 < bytes_ * (1 + backups) <= 100 * 1024 * 1024, name
        logs.append(log)
    assert len(set(logs)) == len(logs)
    assert all(Path(log).parent == place / "run" for log in logs)


def test_a_path_with_spaces_and_quotes_is_one_word(tmp_path: Path) -> None:
    with supervised("a b's") as place:
        place.scripted()
        place.start_ready()
        place.assert_answers()


# ── percent signs ────────────────────────────────────────────────────────────────────────────────────

PERCENT = "/models/ab%2Bcd %s 100%"
SHOW = "import os, sys, time; print(repr(os.environ['LOADONCE_MODEL']), flush=True); time.sleep(600)"


def shown(place: Supervised) -> None:
    wait_for(lambda: place.log("worker0"), "the worker's log")
    assert place.log("worker0").strip() == repr(PERCENT)


def showing(environment: str = "") -> str:
    return f'[program:worker]\ncommand={sys.executable} -c "{SHOW}"\nstartsecs=0\n{environment}\n'


def test_c84_a_percent_sign_in_the_environment_arrives_as_it_is() -> None:
    with supervised() as place:
        place.override(showing())
        place.environment["LOADONCE_MODEL"] = PERCENT
        place.start()
        shown(place)


def test_c84_a_percent_sign_in_the_conf_is_doubled() -> None:
    with supervised() as place:
        doubled = PERCENT.replace("%", "%%")
        place.override(showing(f'environment=LOADONCE_MODEL="{doubled}"'))
        place.start()
        shown(place)


def test_c84_a_single_percent_sign_in_the_conf_is_refused_and_named() -> None:
    with supervised() as place:
        place.override(showing(f'environment=LOADONCE_MODEL="{PERCENT}"'))
        command = [
            str(place.directory / ".venv/bin/supervisord"),
            "-c",
            str(place.directory / "supervisord.conf"),
        ]
        done = subprocess.run(command, env=place.environment, capture_output=True, text=True, timeout=30)
        assert done.returncode != 0
        assert "program:worker" in done.stdout + done.stderr
        assert place.processes() == {}
