"""tools/run.py: progress, the address, a curl line that works; Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import ROOT, wait_for
from tests.system.supervised import Supervised, supervised
from tools.run import CannotStart, gpu_count, worker_count


@pytest.fixture
def place() -> Iterator[Supervised]:
    with supervised() as place:
        (place.directory / "tools").mkdir()
        shutil.copy(ROOT / "tools" / "run.py", place.directory / "tools")
        yield place


class Run:
    """A running tools/run.py and what it prints."""

    def __init__(self, place: Supervised, **environment: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(place.directory / "tools" / "run.py")],
            env={**place.environment, **environment}, cwd="/", text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def wait_said(self, text: str, timeout_s: float = 60) -> None:
        wait_for(lambda: text in self.said or self.process.poll() is not None, repr(text), timeout_s)
        assert text in self.said

    def end(self, timeout_s: float = 60) -> int:
        """Wait for its end; returns the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def test_it_says_the_address_and_a_curl_line_that_works_and_ctrl_c_ends_all(place: Supervised) -> None:
    place.scripted(workers=1)
    run = Run(place)
    run.wait_said("supervisorctl pool status")
    assert f"http://127.0.0.1:{place.port}" in run.said
    command = re.search(r"  (curl .*?)\n\n", run.said, re.DOTALL)
    assert command is not None
    answer = subprocess.run(command[1], shell=True, capture_output=True, text=True, timeout=60)  # noqa: S602
    assert '"choices"' in answer.stdout
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal's Ctrl-C, to the whole group
    assert run.end() == 0
    assert place.processes() == {}
    assert run.lines[-1] == "stopped\n"
    assert [path for path in place.directory.rglob("*") if path.is_socket()] == []


def test_it_shows_how_far_the_load_is(place: Supervised) -> None:
    place.override(
        f'[program:worker]\ncommand="{sys.executable}" "{ROOT}/tests/system/slow_worker.py" 3 '
        "--name %(program_name)s%(process_num)d\nstartsecs=1\n"
    )
    run = Run(place)
    run.wait_said("ready after")
    assert len(re.findall(r"worker0: loading seconds=", run.said)) > 2
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0


def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(place: Supervised) -> None:
    place.override("[program:worker]\nstartretries=1\n")
    run = Run(place, LOADONCE_MODEL="/no/such/model")
    assert run.end(100) == 4
    assert "worker0: FATAL" in run.said and "there is no folder /no/such/model" in run.said
    assert place.processes() == {}


def test_the_number_of_workers_is_taken_from_the_environment_for_this_run(place: Supervised) -> None:
    place.scripted(workers=1)
    text = (place.directory / "run" / "test.conf").read_text()
    (place.directory / "run" / "aa.conf").write_text(text.replace("numprocs=1\n", ""))
    (place.directory / "run" / "test.conf").unlink()
    run = Run(place, LOADONCE_WORKER_COUNT="3")
    run.wait_said("ready after")
    wait_for(lambda: len(place.status().workers) == 3, "three workers")
    run.process.terminate()
    assert run.end() == 0
    assert not (place.directory / "run" / "automatic.conf").exists()


def test_a_second_ctrl_c_ends_it_at_once(place: Supervised) -> None:
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    place.scripted(workers=1)
    place.override(f'[program:stubborn]\ncommand={sys.executable} -c "{stubborn}"\nstopwaitsecs=100\n', "zz")
    run = Run(place)
    run.wait_said("ready after")
    run.process.send_signal(signal.SIGINT)
    run.wait_said("again to stop at once")
    run.process.send_signal(signal.SIGINT)
    run.end(20)
    place.wait_gone()


def test_killed_itself_it_still_leaves_nothing(place: Supervised) -> None:
    place.scripted(workers=1)
    run = Run(place)
    run.wait_said("ready after")
    run.process.kill()
    run.end()
    place.wait_gone()


def test_killed_itself_it_leaves_no_setting_for_the_next_start(place: Supervised) -> None:
    place.scripted(workers=1)
    run = Run(place, LOADONCE_WORKER_COUNT="1")
    run.wait_said("ready after")
    automatic = place.directory / "run" / "automatic.conf"
    assert automatic.exists()
    run.process.kill()
    run.end()
    wait_for(lambda: not automatic.exists(), "the file to go")
    place.wait_gone()


def test_a_taken_port_is_one_line_before_anything_starts(place: Supervised) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", place.port))
        taken.listen()
        run = Run(place)
        assert run.end() == 3
    assert len(run.lines) == 1 and "LOADONCE_PORT=8001 make run" in run.said


def test_a_second_one_in_the_same_place_says_that_it_runs_already(place: Supervised) -> None:
    place.scripted(workers=1)
    place.start_ready()
    run = Run(place, LOADONCE_PORT="0")
    assert run.end() == 3
    assert "runs here already" in run.said
    place.assert_answers()


def test_a_port_that_nobody_could_print_is_refused(place: Supervised) -> None:
    run = Run(place, LOADONCE_PORT="0")
    assert run.end() == 2
    assert len(run.lines) == 1 and "LOADONCE_PORT=0" in run.said


def test_a_wrong_setting_is_one_line(place: Supervised) -> None:
    run = Run(place, LOADONCE_PORT="many")
    assert run.end() == 2
    assert len(run.lines) == 1 and "LOADONCE_PORT" in run.said


def test_one_worker_for_each_gpu_that_is_visible(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert gpu_count(None, tmp_path) == 4
    assert gpu_count("0,2", tmp_path) == 2
    assert gpu_count("GPU-1234", tmp_path) == 1
    assert gpu_count("", tmp_path) == gpu_count("-1", tmp_path) == 0


def test_the_count_can_be_said_and_must_be_a_number() -> None:
    assert worker_count({"LOADONCE_WORKER_COUNT": "5"}) == 5
    assert worker_count({"LOADONCE_DEVICE": "0,1"}) is None
    for wrong in ("0", "-1", "two"):
        with pytest.raises(CannotStart, match="LOADONCE_WORKER_COUNT"):
            worker_count({"LOADONCE_WORKER_COUNT": wrong})
