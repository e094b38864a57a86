"""Linear layers on the CPU by our own kernels: bfloat16 ones, and bitsandbytes' 4-bit ones.

Changes a model's layers in place. A bfloat16 weight is packed in the order in which the kernel reads it,
and the layer keeps nothing else; 4-bit ones stay what and where they are. Needs `native.load` before, and a
processor with bfloat16 dot products; elsewhere nothing is changed.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, Final

import torch
from msgspec import Struct
from torch import Tensor, nn

PANEL: Final = 32  # columns that lie together; as in native/packed.cpp
_LARGE_PAGE: Final = 2 * 2**20  # bytes
_MADV_HUGEPAGE: Final = 14


class Gate(IntEnum):
    """What becomes of a layer's results; as in native/packed.cpp."""

    NONE = 0
    SILU = 1  # two layers in one: silu(first) * second
    GELU_TANH = 2


class PackedShape(Struct, frozen=True):
    """What a packed layer is besides its values: as much as another process needs to build one like it."""

    depth: int
    columns: int  # of the result
    bias: bool = False
    wide: bool = False  # answers in float32
    gate: Gate = Gate.NONE

    @property
    def packed(self) -> tuple[int, int, int, int]:
        """The shape of the packed weight."""
        of_a_panel = PANEL if self.gate is Gate.NONE else PANEL // 2
        return -(-self.columns // of_a_panel), -(-self.depth // 2), PANEL, 2


class PackedLinear(nn.Module):
    """x · weightᵀ + bias in bfloat16, the weight in panels of columns; or two such layers and a gate.

    Attributes:
        packed: bfloat16 [panels, ⌈depth / 2⌉, 32, 2], a panel being 32 columns, or 16 of each of two weights.
    """

    def __init__(self, shape: PackedShape, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("packed", packed)
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Tensor:
        """Tells shape and type to code that asks. Its values are NaN, so that computing with it shows."""
        nothing = torch.tensor(torch.nan, dtype=torch.bfloat16)
        return nothing.expand(self.shape.columns, self.shape.depth)

    def forward(self, x: Tensor) -> Tensor:
        """bfloat16 [..., depth] → [..., columns], float32 where the shape says `wide`."""
        shape = self.shape
        if shape.gate is not Gate.NONE:
            return torch.ops.loadonce.packed_gated(x, self.packed, shape.columns, int(shape.gate))
        return torch.ops.loadonce.packed_linear(x, self.packed, self.bias, shape.columns, shape.wide)

    @classmethod
    def of(cls, layer: nn.Linear, *, wide: bool = False) -> PackedLinear:
        """The same layer, which is in bfloat16; `wide`: answering in float32.

        Of a weight that is shared with an embedding this makes a copy.
        """
        shape = PackedShape(layer.in_features, layer.out_features, layer.bias is not None, wide)
        return cls(shape, _packed(layer.weight, PANEL), None if layer.bias is None else layer.bias.detach())

    @classmethod
    def gated(cls, gate: Tensor, up: Tensor, kind: Gate) -> PackedLinear:
        """activation(x · gateᵀ) * (x · upᵀ), both weights bfloat16 [columns, depth]."""
        shape = PackedShape(gate.shape[1], gate.shape[0], gate=kind)
        return cls(shape, torch.cat([_packed(weight, PANEL // 2) for weight in (gate, up)], dim=2), None)

    @classmethod
    def like(cls, shape: PackedShape) -> PackedLinear:
        """One with tensors of the right kind and no values."""
        bias = torch.empty(shape.columns, dtype=torch.bfloat16) if shape.bias else None
        return cls(shape, torch.empty(shape.packed, dtype=torch.bfloat16), bias)


def _packed(weight: Tensor, columns: int) -> Tensor:
    """bfloat16 [out, in] → [panels, ⌈in / 2⌉, columns, 2], filled up with zeros."""
    weight = weight.detach()
    to_fill = (0, -weight.shape[1] % 2, 0, -weight.shape[0] % columns)
    if any(to_fill):
        weight = nn.functional.pad(weight, to_fill)
    return weight.view(-1, columns, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


class Nf4Shape(Struct, frozen=True):
    """What a 4-bit layer is besides its tensors: as much as another process needs to build one like it."""

    depth: int
    columns: int
    block: int  # weights to a scale
    block2: int  # scales to a scale of scales; 0: scales are float32
    tensors: dict[str, tuple[str, list[int]]]  # name → type and shape


class Nf4Linear(nn.Module):
    """x · weightᵀ + bias with the weight in bitsandbytes' 4-bit blocks."""

    def __init__(self, shape: Nf4Shape, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.shape = shape
        for name in ("weight", "absmax", "code", "absmax2", "code2", "offset", "bias"):
            self.register_buffer(name, tensors.get(name))

    def forward(self, x: Tensor) -> Tensor:
        """bfloat16 [..., depth] → [..., columns]."""
        return torch.ops.loadonce.linear_nf4(
            x,
            self.weight,
            self.absmax,
            self.code,
            self.absmax2,
            self.code2,
            self.offset,
            self.bias,
            self.shape.columns,
            self.shape.block,
            self.shape.block2,
        )

    @classmethod
    def like(cls, shape: Nf4Shape) -> Nf4Linear:
        """One with tensors of the right kind and no values."""
        return cls(
            shape,
            {
                name: torch.empty(size, dtype=getattr(torch, kind))
                for name, (kind, size) in shape.tensors.items()
            },
        )


def use_kernels(model: nn.Module) -> int:
    """Let `model`'s linear layers compute by our kernels, as far as these can.

    Returns:
        how many layers were changed; int8 and unusual 4-bit layers stay as they are.
    """
    if not torch.ops.loadonce.has_bf16_dot():
        return 0
    changed = 0
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16:
            # Logits in float32: rounded ones would make near rivals equal.
            model.set_submodule(name, PackedLinear.of(module, wide=module is head))
            changed += 1
        elif (quantised := _nf4(module)) is not None:
            model.set_submodule(name, quantised)
            changed += 1
    return changed


def gather(model: nn.Module) -> None:
    """Move all packed weights into one piece of memory, in the model's order.

    A step reads them from one end to the other. On pages of 2 MiB that takes a tenth less time than on those
    of 4 KiB; the kernel is free not to give any.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    elements = sum(layer.packed.numel() for layer in layers)
    memory = torch.empty(elements + _LARGE_PAGE // 2, dtype=torch.bfloat16)
    at = -memory.data_ptr() % _LARGE_PAGE // 2
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(memory.data_ptr() + 2 * at), ctypes.c_size_t(2 * elements), _MADV_HUGEPAGE
    )
    for layer in layers:
        room = memory[at : at + layer.packed.numel()]
        at += layer.packed.numel()
        layer.packed = room.view_as(layer.packed).copy_(layer.packed)


def packed_shapes(model: nn.Module) -> dict[str, PackedShape]:
    """The packed layers of a changed model, by name."""
    return {name: module.shape for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def nf4_shapes(model: nn.Module) -> dict[str, Nf4Shape]:
    """The 4-bit layers of a changed model, by name."""
    return {name: module.shape for name, module in model.named_modules() if isinstance(module, Nf4Linear)}


def _nf4(module: nn.Module) -> Nf4Linear | None:
    """The same layer over the same tensors, if it is a 4-bit one that the kernel can compute."""
    state: Any = getattr(getattr(module, "weight", None), "quant_state", None)
    if (
        type(module).__name__ != "Linear4bit"
        or state is None
        or getattr(state, "packing_format_for_cpu", False)
    ):
        return None
    bias, weight = module.bias, module.weight
    if module.compute_dtype != torch.bfloat16 or state.blocksize % 32 or module.in_features % state.blocksize:
        return None
    tensors = {"weight": weight.data, "absmax": state.absmax, "code": state.code}
    if state.nested:
        tensors |= {
            "absmax2": state.state2.absmax,
            "code2": state.state2.code,
            "offset": state.offset.view(1),
        }
    if bias is not None:
        tensors["bias"] = bias.data.to(torch.bfloat16)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return Nf4Linear(
        Nf4Shape(
            depth=module.in_features,
            columns=module.out_features,
            block=state.blocksize,
            block2=state.state2.blocksize if state.nested else 0,
            tensors={
                name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()
            },
        ),
        tensors,
    )
