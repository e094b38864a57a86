"""Models that the paged path refuses: one request at a time, and the same promises all the same."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from broker.logs import Log
from gpu_worker.loading import LoadedModel
from gpu_worker.settings import WorkerSettings
from gpu_worker.whole import WholeRunner, settings_for_one

from . import tiny_models
from .fakes import EOS, VOCAB, Bench, Heard, loaded

CONTEXT = 128
_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 48, "bos_token_id": 1, "eos_token_id": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mamba": {**_SMALL, "state_size": 8, "num_hidden_layers": 2},
    "mamba2": {**_SMALL, "num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 8,
               "num_hidden_layers": 2, "chunk_size": 16},
    "recurrent_gemma": {**_SMALL, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
                        "lru_width": 48, "attention_window_size": 24},
    "lfm2": {**_SMALL, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 64, "layer_types": ["conv", "full_attention", "conv"]},
    "bloom": {**_SMALL, "n_layer": 2, "n_head": 4},
    "rwkv": {**_SMALL, "num_hidden_layers": 2, "attention_hidden_size": 48, "context_length": 256},
}  # fmt: skip
#: These keep their state in the module, where it can't be told from another request's.
STATE_WITHIN = {"recurrent_gemma"}


@cache
def model(architecture: str) -> Any:
    """A random model whose next tokens differ clearly."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    made = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.mul_(3.0)
    made.generation_config.eos_token_id = None
    return made


def bench(architecture: str, **changes: Any) -> Bench:
    """An engine over the runner of one, as `serve` puts it together."""
    net = model(architecture)
    fields: dict[str, Any] = {
        "model": net, "config": net.config, "context": CONTEXT, "eos_ids": frozenset({EOS}),
    }  # fmt: skip
    told: LoadedModel = loaded(**fields)
    runner = WholeRunner(told, Log("worker/test", stream=io.StringIO()))
    runner.warm_up()
    one = settings_for_one(WorkerSettings(), CONTEXT)
    chosen = {"slots": one.slots, "step_tokens": one.step_tokens, "prefix_cache": one.prefix_cache, **changes}
    return Bench(runner, sampler=None, model=told, **chosen)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_requests_that_come_together_get_what_generate_says_one_after_the_other(architecture: str) -> None:
    prompts = tiny_models.prompts(5, most=30)
    expected = [tiny_models.generated(model(architecture), p, 12)[len(p) :] for p in prompts]
    engine = bench(architecture)
    heard = [engine.submit(p, id=str(n), max_tokens=12, ignore_eos=True) for n, p in enumerate(prompts)]
    engine.finish()
    assert [one.token_ids for one in heard] == expected


def test_a_stream_goes_on_from_wherever_another_worker_left_it() -> None:
    request = {"prompt": "abc", "temperature": 1.0, "seed": 9, "max_tokens": 10, "ignore_eos": True}
    undisturbed = bench("mamba").ask(**request)
    assert len(undisturbed.token_ids) == 10
    engine = bench("mamba")
    for cut in range(len(undisturbed.chunks) + 1):
        rest = engine.ask(**request, id=f"cut {cut}", chunks=undisturbed.chunks[:cut])
        both = Heard(undisturbed.chunks[:cut] + rest.chunks)
        assert (both.token_ids, both.text) == (undisturbed.token_ids, undisturbed.text), cut


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in STATE_WITHIN])
def test_a_token_costs_one_token_and_not_the_whole_text_again(architecture: str) -> None:
    engine = bench(architecture)
    fed: list[int] = []
    tensor = engine.runner._tensor

    def counting(ids: list[int]) -> Any:
        fed.append(len(ids))
        return tensor(ids)

    engine.runner._tensor = counting
    engine.ask([5, 6, 7, 8], max_tokens=5, ignore_eos=True)
    assert fed == [4, 1, 1, 1, 1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_that_comes_in_pieces_says_the_same(architecture: str) -> None:
    """As when a step found no memory and is tried in smaller ones: few states take several tokens."""
    (prompt,) = tiny_models.prompts(1, seed=3, most=5)
    prompt = (prompt * 40)[:40]
    whole = bench(architecture).ask(prompt, max_tokens=8, ignore_eos=True).token_ids
    pieces = bench(architecture, step_tokens=16).ask(prompt, max_tokens=8, ignore_eos=True).token_ids
    assert pieces == whole


def test_a_cancelled_request_leaves_nothing_behind_for_the_next() -> None:
    engine = bench("lfm2")
    alone = engine.ask("hello", id="alone", max_tokens=8, ignore_eos=True).token_ids
    engine.submit("a longer prompt that is given up", id="gone", max_tokens=60, ignore_eos=True)
    for _ in range(4):
        engine.step()
    engine.stop("gone")
    assert engine.ask("hello", id="again", max_tokens=8, ignore_eos=True).token_ids == alone


def test_the_logprobs_of_a_prompt_are_those_of_one_forward_pass() -> None:
    heard = bench("mamba").ask("hello", prompt_logprobs=0, echo=True, max_tokens=1)
    told = heard.chunks[0].prompt_logprobs
    ids = heard.chunks[0].prompt_token_ids
    assert told is not None and ids is not None
    with torch.inference_mode():
        logits = model("mamba")(torch.tensor([ids]), use_cache=False).logits[0].float()
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert told[0] is None
    assert [t.logprob for t in told[1:] if t] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_cache_that_says_something_else_is_not_used() -> None:
    told: Any = loaded(model=model("mamba"), context=CONTEXT)
    log = io.StringIO()
    runner = WholeRunner(told, Log("worker/test", stream=log))
    right = runner._step
    runner._step = lambda ids: right(ids).flip(-1)  # type: ignore[method-assign]
    runner.warm_up()
    assert "each step is computed anew" in log.getvalue()
    assert runner._cache_name == ""
