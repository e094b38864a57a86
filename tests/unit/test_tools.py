"""The installer installs once, and torch's build is the machine's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pip as pip_package
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
    monkeypatch.setattr(install, "pip", lambda *args, silent=False: made.append(args))
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

    def pip(*args: str, silent: bool = False) -> None:
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
    def pip(*args: str, silent: bool = False) -> None:
        raise subprocess.CalledProcessError(1, ["pip", *args])

    monkeypatch.setattr(install, "pip", pip)
    assert install.main(["run"]) == install.EXIT_PIP_FAILED
    assert install.installed(install.VENV / ".installed") == {}


@pytest.mark.parametrize("gpu", [False, True])
def test_versions_that_torch_leaves_open_are_bounded_whichever_build_it_is(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(install, "has_gpu", lambda: gpu)
    install.install_torch()
    assert all(str(install.lock_file("cuda")) in call for call in calls)
    bounded = {line.partition("==")[0] for line in install.lock_file("cuda").read_text().splitlines()}
    assert {"cuda-bindings", "cuda-pathfinder", "nvidia-nvjitlink"} <= bounded


def test_another_bound_on_the_cuda_libraries_installs_again(
    calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install.main(["run"])
    calls.clear()
    for name in ("run", "cuda"):
        (tmp_path / f"{name}.lock").write_text(install.lock_file(name).read_text())
    monkeypatch.setattr(install, "HERE", tmp_path)
    assert install.main(["run"]) == 0
    assert calls == []
    (tmp_path / "cuda.lock").write_text("triton==3.8.0\n")
    assert install.main(["run"]) == 0
    assert calls


def test_pip_prints_errors_only_and_none_where_a_failure_is_expected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(pip_package.__file__).parents[1]))
    for silent in (False, True):
        with pytest.raises(subprocess.CalledProcessError):
            install.pip("install", "--no-index", "no-such-package", silent=silent)
        said = capfd.readouterr()
        assert said.out == ""
        assert ("no-such-package" in said.err) is not silent
        assert "WARNING" not in said.err


def test_every_locked_version_is_exact() -> None:
    for name in ("run", "dev", "cuda"):
        lines = [line for line in install.lock_file(name).read_text().splitlines() if line[:1] != "#"]
        assert lines and all(line.count("==") == 1 for line in lines), name


def test_shape_counts_what_a_reader_counts(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text('def f(a, b):\n    """Doc."""\n    if a and b:\n        return 1\n    return 2\n')
    (function,) = shape.functions_of(source)
    assert (shape.length(function), shape.complexity(function), shape.depth(function)) == (4, 3, 1)
