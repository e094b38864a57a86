"""How attention over the paged cache is plugged into transformers' models.

transformers calls `paged_attention` for every layer; what it needs to know of the step travels as one
keyword argument, `paged`, through the model's own forward. Which back end computes it is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from transformers import AttentionInterface

NAME: Final = "loadonce"


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one attention layer asks of its back end, as `support.examine` found it."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int  # tokens that a token sees, itself among them; 0: all
    softcap: float  # 0: none
    sinks: bool  # each head has a learned logit that takes part in the softmax


@dataclass(frozen=True, slots=True)
class PagedInput:
    """One step as attention sees it. Row r holds the tokens query_start[r] to query_start[r + 1].

    The keys and values of all tokens are written to the cache before any is read, and each token sees
    the positions of its own row up to its own, so `context` counts the row's new tokens as well.
    """

    slots: Tensor  # int64 [tokens]: where the token's key and value go: page * page_tokens + offset
    query_start: Tensor  # int32 [rows + 1]
    context: Tensor  # int32 [rows]: tokens of the row in the cache, the new ones included
    page_table: Tensor  # int32 [rows, pages]
    query_lens: Sequence[int]  # the same on the host, for back ends that loop over rows
    context_lens: Sequence[int]
    most_query: int  # the largest of each
    most_context: int
    caches: Sequence[tuple[Tensor, Tensor]]  # per layer: [pages, page_tokens, kv_heads, dim], keys and values
    layers: Sequence[LayerPlan]
    attend: Attend


#: (query [tokens, heads, dim], key and value [tokens, kv_heads, dim], paged, layer number, sinks [heads] or
#: None) → [tokens, heads, value_dim]. Writes key and value into the cache.
Attend = Callable[[Tensor, Tensor, Tensor, PagedInput, int, Tensor | None], Tensor]


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedInput,
    s_aux: Tensor | None = None,
    **ignored: Any,  # scaling, window and cap are in the layer's plan
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, heads, tokens, dim] and so on → [1, tokens, heads, dim]."""
    output = paged.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        paged,
        module.layer_idx,
        s_aux,
    )
    return output.unsqueeze(0), None


def write(cache: tuple[Tensor, Tensor], slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Put each token's key and value [tokens, kv_heads, dim] where its slot says."""
    for pages, new in zip(cache, (key, value), strict=True):
        page_tokens = pages.shape[1]
        pages[slots // page_tokens, slots % page_tokens] = new.to(pages.dtype)


def plug_in(model: nn.Module, implementation: str = NAME) -> None:
    """Let every attention layer of `model` call ours; transformers builds no mask for a name of ours."""
    model.set_attn_implementation(implementation)


# The name is transformers' only handle on us; registering twice is harmless.
AttentionInterface.register(NAME, paged_attention)
