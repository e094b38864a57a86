"""Which models the paged path serves, found by asking the model itself; refusal by the feature's name.

A two-token forward with a listening attention function tells what each layer really wants: heads, scaling,
window, cap, sinks. What isn't understood is refused: never served and silently wrong. Knows nothing of
batches or pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .attention import LayerPlan, plug_in

_LISTENER: Final = "loadonce_listener"

#: Layer types (transformers' own names in `config.layer_types`) that paged attention can serve.
_SERVED_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "attention", "dense", "sparse"})

#: Rotary scalings that depend on the longest sequence in the batch, so neighbours would change the answer.
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


class NotPaged(Exception):  # noqa: N818 - a verdict, not a failure: the caller has another path
    """The paged path can't serve this model; `feature` says why, in a few words."""

    def __init__(self, feature: str) -> None:
        super().__init__(f"the paged engine can't serve this model: {feature}")
        self.feature = feature


def check_config(config: Any, context: int) -> None:
    """Refuse what the configuration alone gives away.

    Args:
        config: the model's transformers configuration.
        context: longest prompt + output to be served, in tokens.

    Raises:
        NotPaged: with the feature's name.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise NotPaged("it is an encoder-decoder")
    text = config.get_text_config()
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - _SERVED_LAYERS)
    if odd:
        raise NotPaged(f"layers of type {', '.join(odd)}")
    shared = getattr(text, "num_kv_shared_layers", 0)
    if shared:
        raise NotPaged(f"{shared} layers share another layer's keys and values")
    _check_rope(text, context)


def _check_rope(text: Any, context: int) -> None:
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type")
        if kind not in _LENGTH_DEPENDENT_ROPE:
            continue
        original = parameters.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", text.max_position_embeddings
        )
        if context > original:
            raise NotPaged(
                f"rotary scaling {kind!r} past {original} tokens depends on the batch"
                f" (--max-context {original} avoids it)"
            )


def examine(model: nn.Module, context: int) -> list[LayerPlan]:
    """Ask every attention layer what it wants, by a forward pass of two tokens.

    Args:
        model: a causal language model, on its device; its attention implementation is replaced.
        context: longest prompt + output to be served, in tokens.

    Returns:
        One plan per layer, in order of `layer_idx`.

    Raises:
        NotPaged: if a layer wants something that the paged path doesn't do.
    """
    check_config(model.config, context)
    device = next(model.parameters()).device
    plug_in(model, _LISTENER)
    if model.config.get_text_config()._attn_implementation != _LISTENER:
        raise NotPaged(f"{type(model).__name__} has an attention of its own")
    heard: dict[int, LayerPlan] = {}
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    with torch.inference_mode():
        model(
            input_ids=tokens,
            position_ids=torch.arange(2, device=device).unsqueeze(0),
            use_cache=False,
            paged=heard,
        )
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(heard) != list(range(layers)):
        raise NotPaged(
            f"{layers - len(heard)} of {layers} layers don't use transformers' attention interface"
        )
    return [heard[layer] for layer in range(layers)]


class _Mask:
    """Stands for the mask that the model would have built: all it says is how far back a token sees."""

    def __init__(self, window: int) -> None:
        self.window = window


def _listening_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **ignored: Any
) -> _Mask:
    """Called instead of building a mask; finds out by asking whether it is causal, and its window."""
    far = 5 * (local_size or 100_000) + 3

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(index) for index in (0, 0, query, key))))

    causal = not sees(far, far + 1) and all(sees(query, query) for query in (0, 1, far))
    if not causal:
        raise NotPaged("tokens that see later ones")
    if local_size is None:
        if not sees(far, 0):
            raise NotPaged("an attention mask of its own")
        return _Mask(0)
    for query in (local_size, 2 * local_size + 1, far):
        if not sees(query, query - local_size + 1) or sees(query, query - local_size):
            raise NotPaged("chunked attention")
    return _Mask(local_size)


def _listening_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    paged: dict[int, LayerPlan] | None = None,
    **wanted: Any,
) -> tuple[Tensor, None]:
    """Called by each layer instead of attention; notes its plan and answers zeros."""
    if paged is None:
        raise NotPaged(f"{type(module).__name__} doesn't hand keyword arguments to its attention")
    if not isinstance(attention_mask, _Mask):
        raise NotPaged(f"{type(module).__name__} builds an attention mask of its own")
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer in paged:
        raise NotPaged(f"{type(module).__name__} attends more than once, or doesn't know its layer")
    _check_wishes(module, wanted)
    scaling = wanted.get("scaling")
    paged[layer] = LayerPlan(
        query_heads=query.shape[1],
        kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        scaling=float(query.shape[3] ** -0.5 if scaling is None else scaling),
        window=attention_mask.window,
        softcap=float(wanted.get("softcap") or 0.0),
        sinks=wanted.get("s_aux") is not None,
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _check_wishes(module: nn.Module, wanted: dict[str, Any]) -> None:
    if wanted.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise NotPaged("tokens that see later ones")
    for name in ("position_bias", "head_mask", "alibi", "block_mask"):
        if wanted.get(name) is not None:
            raise NotPaged(f"attention with {name}")


AttentionInterface.register(_LISTENER, _listening_attention)
AttentionMaskInterface.register(_LISTENER, _listening_mask)
