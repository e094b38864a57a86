"""Attention by gathering each row's pages: plain torch, every feature, any device.

The reference for the other back ends, and what serves where they can't. Knows nothing of how rows came
to be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import LayerPlan, PagedInput, write


def attend(
    query: Tensor, key: Tensor, value: Tensor, paged: PagedInput, layer: int, sinks: Tensor | None
) -> Tensor:
    """See `attention.Attend`."""
    plan, cache = paged.layers[layer], paged.caches[layer]
    write(cache, paged.slots, key, value)
    output = query.new_zeros(query.shape[0], plan.query_heads, plan.value_dim)
    ones = [row for row, length in enumerate(paged.query_lens) if length == 1]
    start = 0
    for row, length in enumerate(paged.query_lens):
        if length > 1:
            rows = slice(start, start + length)
            output[rows] = _rows(query[rows].unsqueeze(0), [row], paged, layer, sinks)[0]
        start += length
    if ones:
        rows_at = torch.tensor(ones, device=query.device)
        tokens_at = paged.query_start[rows_at].long()
        output[tokens_at] = _rows(query[tokens_at].unsqueeze(1), ones, paged, layer, sinks)[:, 0]
    return output


def _rows(query: Tensor, rows: list[int], paged: PagedInput, layer: int, sinks: Tensor | None) -> Tensor:
    """Attention of rows with equally many tokens. query and answer: [rows, tokens, heads, dim]."""
    keys, values = paged.caches[layer]
    page_tokens = keys.shape[1]
    longest = max(paged.context_lens[row] for row in rows)
    pages = -(-longest // page_tokens)
    table = paged.page_table[torch.tensor(rows, device=query.device), :pages].long()  # [rows, pages]
    seen_keys = keys[table].flatten(1, 2)  # [rows, pages * page_tokens, kv_heads, dim]
    seen_values = values[table].flatten(1, 2)
    context = torch.tensor([paged.context_lens[row] for row in rows], device=query.device)
    visible = _visible(context, query.shape[1], seen_keys.shape[1], paged.layers[layer].window)
    return _attention(query, seen_keys, seen_values, visible, paged.layers[layer], sinks)


def _visible(context: Tensor, tokens: int, length: int, window: int) -> Tensor:
    """Which cache positions each token sees: bool [rows, tokens, length]."""
    device = context.device
    position = context[:, None] - tokens + torch.arange(tokens, device=device)  # [rows, tokens]
    at = torch.arange(length, device=device)
    visible = at <= position[..., None]
    if window:
        visible &= at > position[..., None] - window
    return visible


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, plan: LayerPlan, sinks: Tensor | None
) -> Tensor:
    """Attend with query [rows, tokens, heads, dim] to keys and values [rows, length, kv_heads, dim]."""
    rows, tokens, heads, dim = query.shape
    group = heads // plan.kv_heads
    if query.is_cuda and sinks is None and not plan.softcap:
        return _torch_attention(query, keys, values, visible, plan)
    # The heads of a group share their keys: they become more rows of one matrix product.
    grouped = query.reshape(rows, tokens, plan.kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(rows, plan.kv_heads, group * tokens, dim) @ keys.permute(0, 2, 3, 1)
    scores = scores.view(rows, plan.kv_heads, group, tokens, -1).float() * plan.scaling
    if plan.softcap:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, plan.kv_heads, group, 1, 1).expand(rows, -1, -1, tokens, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.to(values.dtype).view(rows, plan.kv_heads, group * tokens, -1)
    mixed = weights @ values.permute(0, 2, 1, 3)  # [rows, kv_heads, group * tokens, value_dim]
    mixed = mixed.view(rows, plan.kv_heads, group, tokens, -1)
    return mixed.permute(0, 3, 1, 2, 4).reshape(rows, tokens, heads, -1)


def _torch_attention(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, plan: LayerPlan) -> Tensor:
    """The same by torch's own function, which never has all scores in memory at once."""
    group = query.shape[2] // plan.kv_heads
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.transpose(1, 2).repeat_interleave(group, dim=1),
        values.transpose(1, 2).repeat_interleave(group, dim=1),
        attn_mask=visible[:, None],
        scale=plan.scaling,
    )
    return mixed.transpose(1, 2)
