"""What the paged path serves, and by what name it refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_worker import support
from gpu_worker.support import NotPaged

from . import tiny_models


def refusal(model_type: str, context: int = 256, **config: Any) -> str:
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**small, **config})).eval()
    with pytest.raises(NotPaged) as caught:
        support.examine(model, context)
    return caught.value.feature


def test_a_plan_tells_alternating_windows_and_caps() -> None:
    plans = support.examine(tiny_models.build("gemma2"), 256)
    assert [plan.window for plan in plans] == [6, 0, 6]
    assert {plan.softcap for plan in plans} == {2.0}
    assert {(plan.query_heads, plan.kv_heads, plan.key_dim) for plan in plans} == {(4, 2, 16)}


def test_a_plan_tells_sinks() -> None:
    assert all(plan.sinks for plan in support.examine(tiny_models.build("gpt_oss"), 256))


def test_the_models_forward_is_as_it_was_after_the_examination() -> None:
    model = tiny_models.build("mistral")
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        before = model(tokens).logits
        support.examine(model, 256)
        model.set_attn_implementation("eager")
        assert torch.equal(model(tokens).logits, before)


def test_an_encoder_decoder_is_refused_by_name() -> None:
    with pytest.raises(NotPaged, match="encoder-decoder"):
        support.check_config(AutoConfig.for_model("t5"), 256)


def test_state_space_layers_are_refused_by_name() -> None:
    assert "layers" in refusal("mamba")


def test_hybrid_layers_are_refused_by_name() -> None:
    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    with pytest.raises(NotPaged, match="linear_attention"):
        support.check_config(config, 256)


def test_chunked_attention_is_refused_by_name() -> None:
    config = AutoConfig.for_model("llama4_text", num_hidden_layers=4)
    with pytest.raises(NotPaged, match="chunked_attention"):
        support.check_config(config, 256)


def test_position_bias_instead_of_positions_is_refused() -> None:
    assert "attention" in refusal("bloom")


def test_rotary_scaling_that_depends_on_neighbours_is_refused_past_its_range() -> None:
    config = AutoConfig.for_model(
        "llama",
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        max_position_embeddings=128,
    )
    support.check_config(config, 128)
    with pytest.raises(NotPaged, match="'dynamic' past 128 tokens.*--max-context 128"):
        support.check_config(config, 129)
