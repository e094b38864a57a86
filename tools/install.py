"""Makes `.venv` and installs exactly what the lock files name. Run by the Makefile; standard library only.

    python3 tools/install.py run          what `make run` needs
    python3 tools/install.py run dev      and the tools for lint and tests

Does nothing, quickly, when the lock files are the ones that were installed before.

torch is chosen by the machine: with an NVIDIA GPU the pinned release as it is; without one its CPU build
if pip's configured sources have it (set TORCH_INDEX to add one), since the other is gigabytes of CUDA. What
the CUDA build needs besides (its libraries, triton) pip takes from torch's own metadata; torch leaves a few
of those versions open, so cuda.lock bounds them all. It installs nothing by itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent
VENV: Final = ROOT / ".venv"
OLDEST: Final = (3, 11)
TORCH: Final = "2.13.0"

EXIT_OLD_PYTHON: Final = 3
EXIT_PIP_FAILED: Final = 4


def main(sets: list[str]) -> int:
    """Install the lock sets `run` and `dev`; returns the exit code."""
    if sys.version_info < OLDEST:
        print(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, this is {sys.version.split()[0]};"
              " set PYTHON, as in: make run PYTHON=python3.11")  # fmt: skip
        return EXIT_OLD_PYTHON
    stamp = VENV / ".installed"
    wanted = {name: digest(name) for name in sets}
    if VENV.exists() and not (VENV / "bin" / "python").exists():
        shutil.rmtree(VENV)  # its interpreter is gone, as after a copy from another machine
    elif VENV.exists() and version_of(VENV) != sys.version_info[:2]:
        print(f"remaking .venv, which isn't of Python {sys.version.split()[0]}", flush=True)
        shutil.rmtree(VENV)
    if wanted.items() <= installed(stamp).items():
        return 0
    if not (VENV / "bin" / "python").exists():
        print("making .venv", flush=True)
        try:
            venv.create(VENV, with_pip=True)
        except subprocess.CalledProcessError:
            shutil.rmtree(VENV, ignore_errors=True)
            print("making .venv failed: this Python has no pip for it (on Debian: apt install python3-venv)")
            return EXIT_PIP_FAILED
    try:
        for name in sets:
            install(name)
        pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    except subprocess.CalledProcessError as problem:
        print(f"installing failed: {' '.join(map(str, problem.cmd))}")
        return EXIT_PIP_FAILED
    stamp.write_text("".join(f"{k} {v}\n" for k, v in {**installed(stamp), **wanted}.items()))
    return 0


def version_of(environment: Path) -> tuple[int, ...]:
    """The Python that an environment was made with, as 3, 11."""
    for line in (environment / "pyvenv.cfg").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "version":
            return tuple(map(int, value.strip().split(".")[:2]))
    return ()


def digest(name: str) -> str:
    """What the set depends on: its lock file, this interpreter, whether there is a GPU."""
    facts = f"{sys.version_info[:2]} {sysconfig.get_platform()} {has_gpu()} {Path(__file__).read_text()}"
    if name == "run":
        facts += lock_file("cuda").read_text()
    return hashlib.sha256(lock_file(name).read_bytes() + facts.encode()).hexdigest()


def installed(stamp: Path) -> dict[str, str]:
    """The digests of the sets that the environment holds."""
    if not stamp.exists():
        return {}
    return dict(line.split() for line in stamp.read_text().splitlines())


def install(name: str) -> None:
    """Install one lock set: torch first, so that nothing else drags in another build of it."""
    print(f"installing the {name} set (minutes, the first time)", flush=True)
    if name == "run":
        install_torch()
    pip("install", "--no-deps", "-r", str(lock_file(name)))


def install_torch() -> None:
    """Install the pinned torch in the build that fits the machine, with its own dependencies."""
    extra = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    bounds = ["-c", str(lock_file("run")), "-c", str(lock_file("cuda"))]
    if has_gpu():
        pip("install", *extra, *bounds, f"torch==={TORCH}")
        return
    try:
        pip("install", *extra, *bounds, f"torch==={TORCH}+cpu", silent=True)
    except subprocess.CalledProcessError:
        print(f"pip's sources have no CPU build of torch {TORCH}: taking the CUDA build, gigabytes large."
              " Set TORCH_INDEX to an index that has CPU builds to avoid it.", flush=True)  # fmt: skip
        pip("install", *bounds, f"torch=={TORCH}")


def has_gpu() -> bool:
    """Whether an NVIDIA driver shows at least one GPU."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists()


def lock_file(name: str) -> Path:
    """Where the exact versions of a set stand."""
    return HERE / f"{name}.lock"


def pip(*args: str, silent: bool = False) -> None:
    """Run the environment's pip, which prints errors only.

    Args:
        args: its arguments.
        silent: not even those, for what may fail.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [str(VENV / "bin" / "python"), "-m", "pip", "-qq", "--disable-pip-version-check", *args]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    subprocess.run(
        command, check=True, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL if silent else None
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["run"]))
