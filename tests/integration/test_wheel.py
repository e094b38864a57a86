"""The built wheel holds the three actors, and nothing else claims their names."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ACTORS = ("broker", "gpu_worker", "http_frontend")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    copied = ["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD"]
    source.mkdir()
    with subprocess.Popen(copied, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(source)], stdin=archive.stdout, check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


def test_only_the_actors_are_top_level_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        tops = {name.split("/")[0] for name in packed.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(ACTORS)


def test_the_wheel_carries_the_frontends_static_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        assert any(name.startswith("http_frontend/static/") for name in packed.namelist())


def test_installed_elsewhere_the_names_are_ours_and_load_no_torch(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, capture_output=True)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import broker, broker.client, gpu_worker, http_frontend\n"
        "for m in (broker, gpu_worker, http_frontend): assert m.__file__.startswith(sys.argv[1]), m\n"
        "assert 'torch' not in sys.modules\n"
        "print(broker.Client.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(target)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == "Client", done.stderr
