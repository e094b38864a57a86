"""Attention on CUDA through torch's `varlen_attn` with a block table, where torch, card and model have it.

`works` decides by trying it against the gathered reference on the device itself. Knows no caps, no sinks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from . import LayerPlan, PagedInput, gathered, write

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None


def attend(
    query: Tensor, key: Tensor, value: Tensor, paged: PagedInput, layer: int, sinks: Tensor | None
) -> Tensor:
    """See `attention.Attend`."""
    plan, (keys, values) = paged.layers[layer], paged.caches[layer]
    write((keys, values), paged.slots, key, value)
    return varlen_attn(
        query.contiguous(),
        keys,
        values,
        paged.query_start,
        None,
        paged.most_query,
        paged.most_context,
        scale=plan.scaling,
        window_size=(plan.window - 1 if plan.window else -1, 0),
        enable_gqa=plan.query_heads != plan.kv_heads,
        seqused_k=paged.context,
        block_table=paged.page_table,
    )


def unsuited(layers: Sequence[LayerPlan], dtype: torch.dtype) -> str | None:
    """Why these layers can't go this way whatever the card; None if they can."""
    if varlen_attn is None or "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"torch {torch.__version__} has no varlen_attn with block tables"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} weights"
    for layer in layers:
        if layer.softcap:
            return "soft caps"
        if layer.sinks:
            return "attention sinks"
        if layer.key_dim != layer.value_dim:
            return "keys and values of different sizes"
    return None


def works(
    layers: Sequence[LayerPlan], page_tokens: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why `attend` doesn't serve on this device; None if it gives what the gathered reference gives.

    Every distinct kind of layer is tried, with a prompt chunk beside decoding rows over scattered pages.
    """
    reason = unsuited(layers, dtype)
    if reason is not None:
        return reason
    for plan in dict.fromkeys(layers):
        try:
            off = _disagreement(plan, page_tokens, dtype, device)
        except (RuntimeError, ValueError, NotImplementedError) as problem:
            return str(problem).splitlines()[0]
        if not off < 0.03:
            return f"its answer is off by {off:.2g}"
    return None


def _disagreement(plan: LayerPlan, page_tokens: int, dtype: torch.dtype, device: torch.device) -> float:
    draw = torch.Generator().manual_seed(0)
    query_lens, pages_each = [1, 5, 1], 3
    context_lens = [2 * page_tokens + 1, page_tokens + 5, 1]
    pages = len(query_lens) * pages_each

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    caches = [
        (
            random(pages, page_tokens, plan.kv_heads, plan.key_dim),
            random(pages, page_tokens, plan.kv_heads, plan.value_dim),
        )
    ]
    table = torch.randperm(pages, generator=draw).view(len(query_lens), pages_each)
    slots = [
        int(table[row, position // page_tokens]) * page_tokens + position % page_tokens
        for row, (tokens, context) in enumerate(zip(query_lens, context_lens, strict=True))
        for position in range(context - tokens, context)
    ]
    starts = [0, 1, 6, 7]
    paged = PagedInput(
        slots=torch.tensor(slots, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context=torch.tensor(context_lens, dtype=torch.int32, device=device),
        page_table=table.to(device, torch.int32),
        query_lens=query_lens,
        context_lens=context_lens,
        most_query=max(query_lens),
        most_context=max(context_lens),
        caches=caches,
        layers=[plan],
        attend=attend,
    )
    tokens = sum(query_lens)
    query = random(tokens, plan.query_heads, plan.key_dim)
    key, value = random(tokens, plan.kv_heads, plan.key_dim), random(tokens, plan.kv_heads, plan.value_dim)
    ours = attend(query, key, value, paged, 0, None).float()
    reference = gathered.attend(query, key, value, paged, 0, None).float()
    return float((ours - reference).norm() / reference.norm())
