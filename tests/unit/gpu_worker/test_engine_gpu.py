"""The whole engine on a CUDA device; skipped, with the reason, where there is none."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from broker.logs import Log
from gpu_worker.runner import Runner
from gpu_worker.settings import WorkerSettings

from . import tiny_models
from .fakes import VOCAB, Bench
from .test_architectures import ARCHITECTURES, agreeing, of, prompts, run_joining

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FIRST_TOKENS = 32


def bench(model: Any, *, compile: bool = False, **settings: Any) -> Bench:
    chosen = {"slots": 6, "step_tokens": 32, "page_tokens": 16, "kv_cache_mib": 16, **settings}
    log = Log("worker/test", stream=io.StringIO())
    runner = Runner(of(model), WorkerSettings(compile=compile, **chosen), log)
    runner.warm_up()
    runner.start_compile()
    return Bench(runner, sampler=None, model=of(model), **chosen)


def requests(count: int, tokens: int) -> list[dict[str, Any]]:
    return [{"prompt": p, "max_tokens": tokens, "ignore_eos": True} for p in prompts(count)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_bfloat16_nine_of_ten_prompts_get_what_generate_says(architecture: str) -> None:
    model = tiny_models.build(architecture, vocab_size=VOCAB, dtype=torch.bfloat16).to(DEVICE)
    heard = run_joining(bench(model), requests(20, FIRST_TOKENS), each=1)
    assert agreeing(model, prompts(20), heard, FIRST_TOKENS) >= 18


def test_captured_steps_say_what_eager_ones_say() -> None:
    model = tiny_models.build("llama", vocab_size=VOCAB, dtype=torch.bfloat16).to(DEVICE)
    asked = prompts(20)
    captured = run_joining(bench(model, compile=True), requests(20, FIRST_TOKENS))
    assert agreeing(model, asked, captured, FIRST_TOKENS) >= 18


def test_c45_a_seed_gives_the_same_tokens_as_on_a_cpu() -> None:
    model = tiny_models.build("llama", vocab_size=VOCAB)
    (prompt,) = prompts(1, seed=5)
    request = {"prompt": prompt, "temperature": 1.0, "seed": 42, "max_tokens": 16, "ignore_eos": True}
    on_cpu = bench(model).ask(**request).token_ids
    on_gpu = bench(tiny_models.build("llama", vocab_size=VOCAB).to(DEVICE)).ask(**request).token_ids
    assert on_gpu == on_cpu


def test_c52_out_of_memory_is_survived_and_memory_comes_back() -> None:
    wide = {"intermediate_size": 65536, "hidden_size": 1024, "vocab_size": VOCAB}
    model = tiny_models.build("llama", dtype=torch.bfloat16, **wide).to(DEVICE)
    engine = bench(model, step_tokens=512)
    long = [7] * 250
    expected = engine.ask(long, id="roomy", max_tokens=8, ignore_eos=True).token_ids
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    # A step of 250 tokens needs 250 × 65536 × 2 bytes for each of its three widest tensors.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 40 * 2**20) / total)
    try:
        starved = engine.ask([8, *long[1:]], id="starved", max_tokens=8, ignore_eos=True)
        small = engine.ask([1, 2, 3], id="small", max_tokens=8, ignore_eos=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert starved.outcome is not None and len(starved.token_ids) == 8
    assert small.outcome is not None
    assert engine.engine._scheduler.budget < 512, "there was memory enough"
    again = engine.ask(long, id="again", max_tokens=8, ignore_eos=True)
    assert again.token_ids == expected
