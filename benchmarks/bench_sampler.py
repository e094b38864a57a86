"""What drawing a token costs: one line per kind of request, every row of the batch with its own seed.

    python benchmarks/bench_sampler.py [--device cuda]

Prints a table and writes benchmarks/results/sampler.json. Logits have the shape of a language model's: a few
likely tokens over a long tail.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final, cast

import torch

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpu_worker.sampler import Sampler  # noqa: E402
from gpu_worker.sequence import SamplingParams, Sequence  # noqa: E402

SIZES: Final = ((64, 49_152), (256, 128_256))
PROMPT_TOKENS: Final = 500
OUTPUT_TOKENS: Final = 500
ROUNDS: Final = 9
KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_k 40": {"temperature": 0.8, "top_k": 40},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_p 0.95, flat": {"temperature": 2.0, "top_p": 0.95},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "repetition_penalty": {"temperature": 0, "repetition_penalty": 1.1},
    "presence_penalty": {"temperature": 0, "presence_penalty": 0.5},
    "logprobs 5": {"temperature": 0, "logprobs": 5},
    "all of it": {
        "temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "logprobs": 5,
    },
}  # fmt: skip


def sequences(rows: int, vocab: int, params: dict[str, Any]) -> list[Sequence]:
    """Requests in the middle of their output."""
    chosen = SamplingParams(max_tokens=10_000, **params)
    made = []
    for row in range(rows):
        token_ids = [(row * 7919 + n * 104_729) % vocab for n in range(PROMPT_TOKENS + OUTPUT_TOKENS)]
        made.append(Sequence(str(row), str(row), token_ids, PROMPT_TOKENS, chosen, row, text=cast(Any, None)))
    return made


def measure(device: torch.device, rows: int, vocab: int, params: dict[str, Any]) -> float:
    """Median milliseconds of a step's sampling."""
    ranks = torch.arange(1, vocab + 1, dtype=torch.float32)
    tail = -1.2 * ranks.log()
    logits = torch.stack([tail[torch.randperm(vocab)] for _ in range(rows)]).to(device)
    batch, sampler, times = sequences(rows, vocab, params), Sampler(device, vocab), []
    for _ in range(ROUNDS):
        own = logits.clone()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        sampler.sample(own, batch)  # ends on the host
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.manual_seed(0)
    results: dict[str, dict[str, float]] = {}
    print(f"| ms per step on {device} | " + " | ".join(f"{r} x {v}" for r, v in SIZES) + " |")
    print("|---" * (len(SIZES) + 1) + "|")
    for name, params in KINDS.items():
        results[name] = {f"{r}x{v}": round(measure(device, r, v, params), 2) for r, v in SIZES}
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in results[name].values()) + " |")
    out = ROOT / "benchmarks" / "results" / "sampler.json"
    out.parent.mkdir(exist_ok=True)
    report = {"device": str(device), "threads": torch.get_num_threads(), "ms": results}
    out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
