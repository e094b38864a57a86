"""Attention on the CPU by our own kernel.

torch's `scaled_dot_product_attention` spends half of a decode step at 16 rows; the kernel reads the pages
where they lie. Needs `native.load` before.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

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
