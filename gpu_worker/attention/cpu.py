"""Attention on the CPU by our own kernel, and linear layers by its sibling.

torch's `scaled_dot_product_attention` spends half of a decode step at 16 rows; the kernel reads the pages
where they lie. Needs `native.load` before.
"""

from __future__ import annotations

from types import MethodType
from typing import Final

import torch
from torch import Tensor, nn

from . import PagedInput

#: Types that the attention kernel computes in.
DTYPES: Final = (torch.float32, torch.bfloat16)


def attend(
    query: Tensor, key: Tensor, value: Tensor, paged: PagedInput, layer: int, sinks: Tensor | None
) -> Tensor:
    """See `attention.Attend`."""
    plan = paged.layers[layer]
    keys, values = paged.caches[layer]
    return torch.ops.loadonce.attend(
        query,
        key,
        value,
        keys,
        values,
        paged.slots,
        paged.query_start,
        paged.context,
        paged.page_table,
        sinks,
        plan.scaling,
        plan.window,
        plan.softcap,
    )


def use_linear_kernel(model: nn.Module) -> int:
    """Let the model's plain bfloat16 linear layers compute by our kernel, where the processor has the dot.

    Returns:
        how many layers were changed. Quantised layers are classes of their own and stay as they are.
    """
    if not torch.ops.loadonce.has_bf16_dot():
        return 0
    changed = 0
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16:
            module.forward = MethodType(_linear, module)
            changed += 1
    return changed


def _linear(self: nn.Linear, x: Tensor) -> Tensor:
    return torch.ops.loadonce.linear(x, self.weight, self.bias)
