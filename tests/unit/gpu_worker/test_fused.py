"""Fused norms and feed-forward layers against the layers of transformers' own models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from gpu_worker import fused, linears, native
from gpu_worker.fused import GatedMlp, NormShape, RmsNorm, Scale
from gpu_worker.linears import Gate, PackedLinear

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    native.load(native.cache_directory(""))
    if not torch.ops.loadonce.has_bf16_dot():
        pytest.skip("this processor has no bfloat16 dot product")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def model_of(kind: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones, or zeros, otherwise
            parameter.data.copy_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("kind", "norms", "scale", "gated", "gate"),
    [
        ("llama", 5, Scale.ROUNDED, 2, Gate.SILU),
        ("mistral", 5, Scale.ROUNDED, 2, Gate.SILU),
        ("qwen2", 5, Scale.ROUNDED, 2, Gate.SILU),
        ("qwen3", 9, Scale.ROUNDED, 2, Gate.SILU),
        ("phi3", 5, Scale.ROUNDED, 2, Gate.SILU),
        ("olmo2", 9, Scale.PLAIN, 2, Gate.SILU),
        ("gemma2", 9, Scale.OFFSET, 2, Gate.GELU_TANH),
        ("gemma3_text", 13, Scale.OFFSET, 2, Gate.GELU_TANH),
        ("mixtral", 5, Scale.ROUNDED, 0, None),  # the experts are the model's own
        ("gpt2", 0, None, 0, None),
    ],
)
def test_a_models_layers_are_found_and_say_what_they_said(
    kind: str, norms: int, scale: Scale | None, gated: int, gate: Gate | None
) -> None:
    model = model_of(kind)
    text = torch.arange(12)[None]
    with torch.inference_mode():
        before = model(text).logits.float()
        assert fused.use_kernels(model) == norms + gated
        after = model(text).logits.float()
    assert {shape.scale for shape in fused.norm_shapes(model).values()} == ({scale} if norms else set())
    assert len(fused.norm_shapes(model)) == norms
    assert len(fused.gated_names(model)) == gated
    gates = [module.shape.gate for module in model.modules() if isinstance(module, PackedLinear)]
    assert gates == [gate] * gated
    assert float((after - before).norm() / before.norm()) < 0.005


def test_float32_layers_stay() -> None:
    assert fused.use_kernels(model_of("llama", torch.float32)) == 0


class OddRMSNorm(nn.Module):
    """Looks like a norm and isn't one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class OddMLP(nn.Module):
    """Has the parts of a gated layer and puts them together otherwise."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias), nn.Linear(64, 96, bias)
        self.down_proj = nn.Linear(96, 64, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("odd", [OddRMSNorm(), OddMLP(), OddMLP(bias=True)])
def test_a_layer_that_only_looks_the_part_stays(odd: nn.Module) -> None:
    model = nn.Sequential(odd).to(torch.bfloat16)
    assert fused.use_kernels(model) == 0
    assert model[0] is odd


@pytest.mark.parametrize("scale", list(Scale))
@pytest.mark.parametrize("size", [8, 77, 576])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_norm_of_any_size(rows: int, size: int, scale: Scale) -> None:
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(2, rows, size)).bfloat16(), torch.randn(size).bfloat16()
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    if scale is Scale.ROUNDED:
        normed = normed.bfloat16().double()
    exact = normed * (weight.double() + (scale is Scale.OFFSET))
    with torch.inference_mode():
        ours = RmsNorm(NormShape(size, 1e-5, scale), weight)(x)
    # At most one rounding away, and hardly ever that.
    assert torch.allclose(ours.double(), exact, rtol=2**-7, atol=0.0)
    assert float((ours != exact.bfloat16()).float().mean()) < 0.01


def test_a_norm_takes_rows_that_do_not_lie_together() -> None:
    x, weight = torch.randn(4, 3, 64).bfloat16().transpose(0, 1), torch.ones(64).bfloat16()
    norm = RmsNorm(NormShape(64, 1e-5, Scale.ROUNDED), weight)
    with torch.inference_mode():
        assert torch.equal(norm(x), norm(x.contiguous()))


@pytest.mark.parametrize(("kind", "function"), [(Gate.SILU, "silu"), (Gate.GELU_TANH, "gelu")])
@pytest.mark.parametrize("columns", [5, 16, 33, 1536])
@pytest.mark.parametrize("rows", [1, 15, 130])
def test_a_gated_layer_rounds_where_its_parts_would(
    rows: int, columns: int, kind: Gate, function: str
) -> None:
    torch.manual_seed(0)
    gate, up = (nn.Linear(64, columns, bias=False).to(torch.bfloat16) for _ in range(2))
    x = (10 * torch.randn(rows, 64)).bfloat16()
    parts = [PackedLinear.of(layer) for layer in (gate, up)]
    with torch.inference_mode():
        ours = PackedLinear.gated(gate.weight, up.weight, kind)(x)
        one = parts[0](x)
        act = nn.functional.silu(one) if function == "silu" else nn.functional.gelu(one, approximate="tanh")
        theirs = act * parts[1](x)
    # Far below zero torch's gelu has lost its digits; ours hasn't.
    assert torch.allclose(ours.float(), theirs.float(), rtol=2**-6, atol=1e-5)
    assert float(((ours != theirs) & (theirs.abs() > 1e-2)).float().mean()) < 0.01


def test_a_gate_stays_finite_far_out_and_lets_nan_through() -> None:
    one, up = nn.Linear(2, 16, bias=False).bfloat16(), nn.Linear(2, 16, bias=False).bfloat16()
    one.weight.data.fill_(1.0)
    up.weight.data.fill_(1.0)
    layer = PackedLinear.gated(one.weight, up.weight, Gate.SILU)
    x = torch.tensor([[500.0, 0.0], [-500.0, 0.0], [-1e4, 0.0], [torch.nan, 1.0]]).bfloat16()
    with torch.inference_mode():
        said = layer(x)[:, 0].tolist()
    assert said[:3] == pytest.approx([249856.0, 0.0, 0.0], abs=1e-20)
    assert said[3] != said[3]


def test_layers_built_from_their_shapes_alone_have_the_same_tensors() -> None:
    """The process that compiles knows the model by its shapes."""
    model = model_of("llama")
    fused.use_kernels(model)
    linears.use_kernels(model)
    for module in model.modules():
        if isinstance(module, RmsNorm):
            like: nn.Module = RmsNorm.like(module.shape)
        elif isinstance(module, PackedLinear):
            like = PackedLinear.like(module.shape)
        else:
            continue
        assert {n: (t.dtype, t.shape) for n, t in like.state_dict().items()} == {
            n: (t.dtype, t.shape) for n, t in module.state_dict().items()
        }
    assert [n for n, _ in GatedMlp.empty().named_children()] == ["gate_up", "down_proj"]
