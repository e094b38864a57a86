"""`python -m gpu_worker check`: what works on this machine, a line each; non-zero if serving can't."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EXIT_CANNOT_SERVE: Final = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found."""

    name: str
    ok: bool
    said: str
    needed: bool = True  # serving can't work without it


class Missing(Exception):
    """A probe's answer: it doesn't work, and why."""


def probe(name: str, look: Callable[[], str], *, needed: bool = True) -> Finding:
    """Try one thing; whatever goes wrong is its answer."""
    try:
        return Finding(name, True, look(), needed)
    except Exception as problem:  # noqa: BLE001 - a probe's failure is what we came for
        first = str(problem).splitlines()[0] if str(problem) else ""
        return Finding(name, False, first or type(problem).__name__, needed)


def findings() -> list[Finding]:
    """All probes, in the order in which a newcomer would meet their failures."""
    return [
        probe("python", lambda: sys.version.split()[0]),
        probe("torch", _torch),
        probe("transformers", _transformers),
        probe("cuda", _cuda, needed=False),
        probe("bfloat16", _bfloat16, needed=False),
        probe("bitsandbytes nf4", lambda: _bitsandbytes("nf4"), needed=False),
        probe("bitsandbytes int8", lambda: _bitsandbytes("int8"), needed=False),
        probe("grammars", _grammars, needed=False),
        probe("compiler", _compiler, needed=False),
        probe("memory", _memory),
        probe("cache directory", _cache_directory),
        probe("run directory", _run_directory),
        probe("sockets", _sockets),
        probe("broker", _broker, needed=False),
        probe("demo model", _demo_model, needed=False),
    ]


def main(argv: Sequence[str]) -> int:
    """Print the findings; returns the exit code."""
    if argv:
        asked = list(argv) in (["--help"], ["-h"])
        print("usage: python -m gpu_worker check", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    found = findings()
    for finding in found:
        mark = "ok  " if finding.ok else ("FAIL" if finding.needed else "no  ")
        print(f"{mark} {finding.name:<18} {finding.said}")
    bad = [finding.name for finding in found if finding.needed and not finding.ok]
    print(f"can't serve: {', '.join(bad)}" if bad else "this machine can serve")
    return EXIT_CANNOT_SERVE if bad else 0


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _transformers() -> str:
    import transformers

    return str(transformers.__version__)


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise Missing(
            "no GPU: workers run on the CPU" + (f" (CUDA_VISIBLE_DEVICES={seen!r})" if seen else "")
        )
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{i}: {p.name} sm {p.major}.{p.minor}" for i, p in enumerate(names))


def _bfloat16() -> str:
    import torch

    from .loading import choose_dtype

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    chosen = choose_dtype("auto", device)
    if chosen is not torch.bfloat16:
        raise Missing(f"{device} has none: {str(chosen).removeprefix('torch.')} is used")
    return f"used on {device}"


def _bitsandbytes(kind: str) -> str:
    import bitsandbytes as bnb
    import torch

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if kind == "nf4":
        layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    else:
        layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    wanted = torch.eye(64)
    layer.load_state_dict({"weight": wanted})
    given = torch.ones(1, 64, device=device)
    off = float((layer.to(device)(given).float() - given).abs().max())
    if not off < 0.2:
        raise Missing(f"a layer is off by {off:.2g}")
    return f"{bnb.__version__} on {device}"


def _grammars() -> str:
    import llguidance

    return f"llguidance {llguidance.__version__}"


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    if not found:
        raise Missing("no g++ or clang++: CPU kernels and the compiled step are left out")
    return Path(found).name


def _memory() -> str:
    from .kv_cache import host_available_bytes

    return f"{host_available_bytes() / 1024**3:.1f} GiB free"


def _cache_directory() -> str:
    from .loading import cache_folder
    from .settings import WorkerSettings

    folder = cache_folder(WorkerSettings(cache_dir=os.environ.get("LOADONCE_CACHE_DIR", "")))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return f"{folder}, {shutil.disk_usage(folder).free / 1024**3:.0f} GiB free"


def _run_directory() -> str:
    from broker.addresses import make_run_dir

    return str(make_run_dir())


def _sockets() -> str:
    import zmq

    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{folder}/probe"
        with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
            router.bind(address)
            dealer.connect(address)
            begun = time.perf_counter()
            dealer.send(b"ping")
            if not router.poll(2000):
                raise Missing("no message came through an ipc socket")
            router.recv_multipart()
            took = time.perf_counter() - begun
    return f"ZeroMQ {zmq.zmq_version()}, {1e6 * took:.0f} µs for the first message"


def _broker() -> str:
    from broker.client import Client

    with Client() as client:
        models = client.models(timeout_s=1.0)
    return ", ".join(f"{m.name} ({m.workers} workers)" for m in models) or "it runs, and has no workers yet"


def _demo_model() -> str:
    from .loading import demo_model

    return Path(demo_model()).name
