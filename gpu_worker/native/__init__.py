"""Our own CPU kernels: built once with the compiler at hand, kept on disk, loaded into torch.

Without a compiler there are none, and torch's own operations serve. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

_HERE: Final = Path(__file__).parent
_SOURCES: Final = tuple(sorted(_HERE.glob("*.cpp")))
_FLAGS: Final = (
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fPIC",
    "-shared",
)
_BUILD_TIMEOUT_S: Final = 300


class BuildFailed(Exception):  # noqa: N818 - the worker goes on without
    """No compiler, or it refused; the message says which and why."""


def cache_directory(setting: str) -> Path:
    """Where compiled code is kept: under the setting `cache_dir`, or the user's cache."""
    root = Path(setting) if setting else Path.home() / ".cache" / "loadonce"
    path = root / "compiled"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@cache
def load(directory: Path) -> Path:
    """Build the kernels if `directory` hasn't them yet, and register `torch.ops.loadonce`.

    Returns:
        the library, by whose name a cache of code compiled against it can be keyed.

    Raises:
        BuildFailed: with the compiler's own words.
    """
    compiler = _compiler()
    library = directory / f"kernels-{_key(compiler)}.so"
    if not library.exists():
        _build(compiler, library)
    torch.ops.load_library(str(library))
    _register_shapes()
    return library


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise BuildFailed("no C++ compiler on PATH (CXX, g++, clang++ or c++)")


def _tuning() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _key(compiler: str) -> str:
    """What the library depends on: sources, flags, compiler, torch and the processor's features."""
    digest = hashlib.sha256()
    for source in (*_SOURCES, *sorted(_HERE.glob("*.h"))):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    cpu = Path("/proc/cpuinfo")
    features = [line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))][:1]
    digest.update(repr((_FLAGS, _tuning(), version, torch.__version__, features)).encode())
    return digest.hexdigest()[:16]


def _build(compiler: str, library: Path) -> None:
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    linked = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-l:libgomp.so.1"]
    # Beside its final place, so that the rename is atomic: two workers may build at the same time.
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        command = [compiler, *_FLAGS, _tuning(), *include, *map(str, _SOURCES), *linked, "-o", str(built)]
        try:
            subprocess.run(command, capture_output=True, check=True, text=True, timeout=_BUILD_TIMEOUT_S)
        except subprocess.CalledProcessError as problem:
            raise BuildFailed(f"{compiler} failed: {problem.stderr[-2000:]}") from problem
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise BuildFailed(f"{compiler} failed: {problem}") from problem
        built.replace(library)


def _register_shapes() -> None:
    """Tell torch's compiler what the kernels return."""

    @torch.library.register_fake("loadonce::packed_linear")
    def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, columns: int, wide: bool) -> Tensor:
        return x.new_empty((*x.shape[:-1], columns), dtype=torch.float32 if wide else x.dtype)

    @torch.library.register_fake("loadonce::packed_gated")
    def _packed_gated(x: Tensor, packed: Tensor, columns: int, gate: int) -> Tensor:
        return x.new_empty((*x.shape[:-1], columns))

    @torch.library.register_fake("loadonce::rms_norm")
    def _rms_norm(x: Tensor, weight: Tensor, epsilon: float, scale: int) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @torch.library.register_fake("loadonce::linear_nf4")
    def _linear_nf4(x: Tensor, *rest: object) -> Tensor:
        columns = rest[-3]
        return x.new_empty((*x.shape[:-1], columns))

    @torch.library.register_fake("loadonce::keep")
    def _keep(value: Tensor) -> Tensor:
        return torch.empty_like(value)

    @torch.library.register_fake("loadonce::attend")
    def _attend(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))
