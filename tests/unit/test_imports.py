"""Imports point one way: http_frontend → broker's public face ← gpu_worker; and who loads what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FACE = {
    "protocol", "errors", "calls", "requests", "client", "async_client", "listeners", "wire", "frames",
    "options", "logs", "addresses", "curve", "lifeline",
}  # fmt: skip
ACTORS = {"broker", "gpu_worker", "http_frontend"}


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it; ``from a import b`` counts as ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def files_of(actor: str) -> list[Path]:
    files = sorted((ROOT / actor).rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("actor", ["http_frontend", "gpu_worker"])
def test_others_import_only_the_public_face_of_the_broker(actor: str) -> None:
    for path in files_of(actor):
        modules = {name.split(".")[1] for name in imported(path) if name.startswith("broker.")}
        assert modules <= FACE, f"{path.relative_to(ROOT)} imports {sorted(modules - FACE)}"


@pytest.mark.parametrize("actor", sorted(ACTORS))
def test_actors_import_no_actor_but_the_broker(actor: str) -> None:
    forbidden = ACTORS - {actor, "broker"}
    for path in files_of(actor):
        heads = {name.split(".")[0] for name in imported(path)}
        assert not heads & forbidden, f"{path.relative_to(ROOT)} imports {sorted(heads & forbidden)}"


def test_the_public_face_imports_nothing_of_the_broker_process() -> None:
    for module in sorted(FACE):
        path = ROOT / "broker" / f"{module}.py"
        modules = {name.split(".")[1] for name in imported(path) if name.startswith("broker.")}
        assert modules <= FACE, f"{path.name} imports {sorted(modules - FACE)}"


def test_the_protocol_imports_msgspec_and_the_errors_alone() -> None:
    names = imported(ROOT / "broker" / "protocol.py")
    heads = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert heads == {"msgspec", "broker"}
    assert {name.split(".")[1] for name in names if name.startswith("broker.")} == {"errors"}


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("broker", {"torch", "transformers", "aiohttp"}),
        ("http_frontend", {"torch", "transformers"}),
        ("http_frontend.__main__", {"torch", "transformers"}),
        ("gpu_worker", {"torch", "transformers"}),
    ],
)
def test_importing_a_package_loads_nothing_heavy(package: str, unwanted: set[str]) -> None:
    code = f"import sys, {package}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert package in done.stdout.split()
    assert not unwanted & set(done.stdout.split())
