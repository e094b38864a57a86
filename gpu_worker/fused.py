"""Norms and gated feed-forward layers of transformers' models on the CPU, each as one kernel.

A layer is known by its parts, and taken only if the kernel says what the layer itself says of random input:
many models have their own class for the same thing. bfloat16 only. Needs `native.load` before, and a
processor with bfloat16 dot products; elsewhere nothing is changed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch
from msgspec import Struct
from torch import Tensor, nn

from .linears import Gate, PackedLinear

_TRIAL_ROWS: Final = 16
_MOST_UNEQUAL: Final = 0.01  # share of a norm's results that may be the neighbouring number
_WEIGHTS: Final = {f"{name}_proj.weight" for name in ("gate", "up", "gate_up", "down")}
_FURTHEST: Final = 0.01  # of a feed-forward layer's results, relative


class Scale(IntEnum):
    """Where a norm rounds and what it multiplies with; as in native/norm.cpp."""

    PLAIN = 0
    ROUNDED = 1
    OFFSET = 2


class NormShape(Struct, frozen=True):
    """What a norm is besides its weight."""

    size: int
    epsilon: float
    scale: Scale


class RmsNorm(nn.Module):
    """x / √(mean(x²) + ε) times weight, bfloat16 [..., size]."""

    def __init__(self, shape: NormShape, weight: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """bfloat16 [..., size] → the same shape."""
        shape = self.shape
        return torch.ops.loadonce.rms_norm(x, self.weight, shape.epsilon, int(shape.scale))

    @classmethod
    def like(cls, shape: NormShape) -> RmsNorm:
        """One with a weight of the right kind and no values."""
        return cls(shape, torch.empty(shape.size, dtype=torch.bfloat16))


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)), of which all but `down` is one kernel."""

    def __init__(self, gate_up: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down_proj = down_proj

    def forward(self, x: Tensor) -> Tensor:
        """bfloat16 [..., depth] → the same shape."""
        return self.down_proj(self.gate_up(x))

    @classmethod
    def empty(cls) -> GatedMlp:
        """One whose parts are put in later."""
        return cls(nn.Identity(), nn.Identity())


def use_kernels(model: nn.Module) -> int:
    """Let `model`'s norms and gated feed-forward layers compute by our kernels, as far as these can.

    Returns:
        how many were changed.
    """
    if not torch.ops.loadonce.has_bf16_dot():
        return 0
    changed = 0
    for name, module in list(model.named_modules()):
        fused = _norm(module) or _gated(module)
        if fused is not None:
            model.set_submodule(name, fused)
            changed += 1
    return changed


def norm_shapes(model: nn.Module) -> dict[str, NormShape]:
    """The norms of a changed model, by name."""
    return {name: module.shape for name, module in model.named_modules() if isinstance(module, RmsNorm)}


def gated_names(model: nn.Module) -> list[str]:
    """The gated feed-forward layers of a changed model."""
    return [name for name, module in model.named_modules() if isinstance(module, GatedMlp)]


def _norm(module: nn.Module) -> RmsNorm | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not type(module).__name__.endswith("RMSNorm")
        or len(list(module.parameters())) != 1
        or not isinstance(weight, Tensor)
        or not isinstance(epsilon, float)
        or weight.dtype != torch.bfloat16
        or weight.ndim != 1
    ):
        return None
    x = _trial(weight.numel())
    with torch.inference_mode():
        theirs = module(x)
        for scale in Scale:
            ours = RmsNorm(NormShape(weight.numel(), epsilon, scale), weight.detach())
            said = ours(x)
            close = torch.allclose(said.float(), theirs.float(), rtol=0.01, atol=0.0)
            if close and float((said != theirs).float().mean()) <= _MOST_UNEQUAL:
                return ours
    return None


def _gated(module: nn.Module) -> GatedMlp | None:
    halves, down = _gate_and_up(module), _weight(module, "down_proj")
    if (
        halves is None
        or down is None
        or not type(module).__name__.endswith("MLP")
        or {name for name, _ in module.named_parameters()} - _WEIGHTS  # a bias, or something besides
        or any(weight.dtype != torch.bfloat16 for weight in (*halves, down))
    ):
        return None
    x = _trial(halves[0].shape[1])
    with torch.inference_mode():
        theirs = module(x).float()
        for kind in (Gate.SILU, Gate.GELU_TANH):
            ours = GatedMlp(PackedLinear.gated(*halves, kind), module.get_submodule("down_proj"))
            if float((ours(x).float() - theirs).norm()) <= _FURTHEST * float(theirs.norm()):
                return ours
    return None


def _gate_and_up(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The two weights [columns, depth], which some models have in one layer."""
    both, gate, up = (_weight(module, f"{name}_proj") for name in ("gate_up", "gate", "up"))
    if both is not None and both.shape[0] % 2 == 0:
        gate, up = both.chunk(2)
    return (gate, up) if gate is not None and up is not None and gate.shape == up.shape else None


def _weight(module: nn.Module, name: str) -> Tensor | None:
    """That of one of its linear layers; None for a layer of another kind."""
    layer = getattr(module, name, None)
    return layer.weight if isinstance(layer, nn.Linear) and type(layer) is nn.Linear else None


def _trial(size: int) -> Tensor:
    return torch.randn(_TRIAL_ROWS, size, generator=torch.Generator().manual_seed(0)).bfloat16()
