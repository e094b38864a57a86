"""The installer installs once, and torch's build is the machine's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import install, shape


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """Every call of pip, in an installer that works in an empty folder."""
    made: list[tuple[str, ...]] = []
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / ".venv" / "pyvenv.cfg").write_text(f"home = x\nversion = {sys.version.split()[0]}\n")
    monkeypatch.setattr(install, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(install, "pip", lambda *args: made.append(args))
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    return made


def test_a_second_install_does_nothing(calls: list[tuple[str, ...]]) -> None:
    assert install.main(["run"]) == 0
    assert calls
    calls.clear()
    assert install.main(["run"]) == 0
    assert calls == []


def test_the_tools_are_added_to_what_is_there(calls: list[tuple[str, ...]]) -> None:
    install.main(["run"])
    calls.clear()
    install.main(["run", "dev"])
    assert any(str(install.lock_file("dev")) in call for call in calls)


def test_an_environment_of_another_python_is_made_anew(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    install.main(["run"])
    calls.clear()
    (install.VENV / "pyvenv.cfg").write_text("version = 3.9.1\n")
    monkeypatch.setattr("tools.install.venv.create", lambda path, with_pip: path.mkdir())
    assert install.main(["run"]) == 0
    assert calls and not (install.VENV / "pyvenv.cfg").exists()


def test_a_changed_lock_installs_again(calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    install.main(["run"])
    calls.clear()
    monkeypatch.setattr(install, "digest", lambda name: "another")
    install.main(["run"])
    assert calls


def test_without_a_gpu_the_cpu_build_of_torch_is_asked_for_first(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    install.install_torch()
    assert [call[-1] for call in calls] == [f"torch==={install.TORCH}+cpu"]


def test_with_a_gpu_the_cpu_build_is_never_taken(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "has_gpu", lambda: True)
    install.install_torch()
    assert [call[-1] for call in calls] == [f"torch==={install.TORCH}"]


def test_where_there_is_no_cpu_build_the_other_one_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def pip(*args: str) -> None:
        asked.append(args[-1])
        if args[-1].endswith("+cpu"):
            raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(install, "has_gpu", lambda: False)
    monkeypatch.setattr(install, "pip", pip)
    install.install_torch()
    assert asked[-1] == f"torch=={install.TORCH}"
    assert "TORCH_INDEX" in capsys.readouterr().out


def test_a_failed_install_is_said_and_not_remembered(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(*args: str) -> None:
        raise subprocess.CalledProcessError(1, ["pip", *args])

    monkeypatch.setattr(install, "pip", pip)
    assert install.main(["run"]) == install.EXIT_PIP_FAILED
    assert install.installed(install.VENV / ".installed") == {}


def test_every_locked_version_is_exact() -> None:
    for name in ("run", "dev"):
        lines = [line for line in install.lock_file(name).read_text().splitlines() if line[:1] != "#"]
        assert lines and all(line.count("==") == 1 for line in lines), name


def test_shape_counts_what_a_reader_counts(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text('def f(a, b):\n    """Doc."""\n    if a and b:\n        return 1\n    return 2\n')
    (function,) = shape.functions_of(source)
    assert (shape.length(function), shape.complexity(function), shape.depth(function)) == (4, 3, 1)
