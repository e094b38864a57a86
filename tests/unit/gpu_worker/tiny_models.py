"""Tiny random models of many architectures, and a bare loop that drives a `Runner` over them."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from broker.logs import Log
from gpu_worker.runner import Runner
from gpu_worker.settings import WorkerSettings

VOCAB = 97

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {**_SMALL, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

#: model type → configuration. Windows are far shorter than the texts of the tests.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 7},
    "gemma2": {**_GROUPED, "sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_GROUPED, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "phi3": {**_GROUPED, "sliding_window": 9},
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_neox": _SMALL,
    "olmo2": _GROUPED,
    "mixtral": {**_GROUPED, **_EXPERTS},
    "qwen3_moe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {**_GROUPED, **_EXPERTS, "sliding_window": 8},
}


def build(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose weights are large enough for its next tokens to differ clearly."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**ARCHITECTURES[model_type], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.mul_(3.0 if "embed" not in name else 10.0)
            if "sinks" in name:
                weight.normal_(0.0, 2.0)
    model.generation_config.eos_token_id = None
    return model


def loaded(model: Any, **changes: Any) -> Any:
    """The `LoadedModel` that a loader would have made, as far as a `Runner` reads it."""
    parameter = next(model.parameters())
    fields = {
        "model": model,
        "config": model.config,
        "device": parameter.device,
        "dtype": parameter.dtype,
        "context": 256,
        "vocab": model.config.get_text_config().vocab_size,
    }
    return SimpleNamespace(**{**fields, **changes})


def runner(model: Any, *, page_tokens: int = 4, compile: bool = False, **settings: Any) -> Runner:
    """A runner over `model` with a cache of one MiB."""
    chosen = WorkerSettings(kv_cache_mib=1, page_tokens=page_tokens, compile=compile, **settings)
    return Runner(loaded(model), chosen, Log("worker/test", stream=io.StringIO()))


@dataclass(eq=False)
class Sequence:
    """As much of a sequence as a runner reads."""

    token_ids: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    sequence: Sequence
    tokens: int


class Loop:
    """Greedy generation with as many joins, leaves and chunks as the caller likes."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.free = list(range(runner.pages_total))[::-1]

    def join(self, prompt: list[int]) -> Sequence:
        return Sequence(list(prompt))

    def leave(self, sequence: Sequence) -> None:
        self.free.extend(sequence.pages)
        sequence.pages = []

    def step(self, sequences: list[Sequence], *, chunk: int = 1000) -> torch.Tensor:
        """Compute up to `chunk` tokens of each sequence; append a token where its end is reached."""
        rows = [Row(s, min(chunk, len(s.token_ids) - s.computed)) for s in sequences]
        for row in rows:
            needed = -(-(row.sequence.computed + row.tokens) // self.runner.page_tokens)
            while len(row.sequence.pages) < needed:
                row.sequence.pages.append(self.free.pop())
        logits = self.runner.forward(rows)
        drawn = iter(logits.argmax(-1).tolist())
        for row in rows:
            row.sequence.computed += row.tokens
            if row.sequence.computed == len(row.sequence.token_ids):
                row.sequence.token_ids.append(next(drawn))
        return logits


def prompts(count: int, *, seed: int = 1, most: int = 40) -> list[list[int]]:
    """Random prompts of 1 to `most` tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most + 1, (count,), generator=draw).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for length in lengths]


def generated(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """What transformers' own greedy `generate` makes of a prompt."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt], device=model.device),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0].tolist()
