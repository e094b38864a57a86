"""The tensors behind the pages, and how many pages there are. Knows nothing of who owns a page."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from broker.logs import Log

from .attention import LayerPlan
from .settings import WorkerSettings

_MIB: Final = 1024 * 1024

#: Without a setting, a CPU worker takes this share of the memory that is free after loading …
_HOST_SHARE: Final = 0.4
#: … and no more than this, because a host has other things to do.
_HOST_MOST_BYTES: Final = 4 * 1024 * _MIB


def page_bytes(layers: Sequence[LayerPlan], page_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    per_token = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return per_token * page_tokens * dtype.itemsize


def allocate(
    layers: Sequence[LayerPlan],
    pages: int,
    page_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Key and value pages of each layer: [pages + 1, page_tokens, kv_heads, dim].

    The page after the last belongs to nobody: padded tokens of a captured step write there. On the CPU a
    head's part of a page lies in one piece, which is what one task of the kernel reads, and memory is only
    taken as it is touched; on devices a token's heads lie together, as torch's attention wants them.
    """

    def pages_of(layer: LayerPlan, dim: int) -> Tensor:
        if device.type == "cpu":
            return _untouched((pages + 1, layer.kv_heads, page_tokens, dim), dtype).transpose(1, 2)
        return torch.zeros(pages + 1, page_tokens, layer.kv_heads, dim, dtype=dtype, device=device)

    return [(pages_of(layer, layer.key_dim), pages_of(layer, layer.value_dim)) for layer in layers]


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory before they are written; torch's own are written once to be zeros."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def host_available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: the machine's, or what its control group leaves.

    Args:
        root: where `proc` and `sys` are; another one in tests.
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    free = [int(fields["MemAvailable"].split()[0]) * 1024]
    for limit, usage in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if (root / limit).exists() and (root / usage).exists():
            most = (root / limit).read_text().strip()
            if most != "max":
                free.append(int(most) - int((root / usage).read_text()))
    return max(0, min(free))


@dataclass(frozen=True, slots=True)
class Room:
    """What the sizing saw and chose; the worker logs it."""

    free_bytes: int  # before the cache
    reserved_bytes: int  # kept for activations, logits and captured graphs
    cache_bytes: int
    page_bytes: int
    pages: int
    tokens: int


def size(
    loaded: Any,
    layers: Sequence[LayerPlan],
    settings: WorkerSettings,
    log: Log,
    *,
    free_bytes: int | None = None,
) -> Room:
    """How many pages to have: from the setting, or from what is free on the device once the model is there.

    Args:
        loaded: the `LoadedModel`.
        layers: what each layer keeps.
        settings: `kv_cache_mib`, `memory_fraction`, `slots`, `step_tokens`, `page_tokens`.
        log: gets the numbers.
        free_bytes: for tests; what the device has free.

    Raises:
        MemoryError: if there isn't room for a single page.
    """
    one = page_bytes(layers, settings.page_tokens, loaded.dtype)
    reserved = _reserve(loaded, settings)
    if free_bytes is None:
        free_bytes = _free_bytes(loaded.device, settings)
    if settings.kv_cache_mib:
        budget = settings.kv_cache_mib * _MIB
    elif loaded.device.type == "cpu":
        budget = min(int(_HOST_SHARE * max(0, free_bytes - reserved)), _HOST_MOST_BYTES)
    else:
        budget = free_bytes - reserved
    # More than all slots can fill would only be prefix cache for prompts that nobody holds; allow it twice.
    useful = 2 * settings.slots * -(-loaded.context // settings.page_tokens)
    pages = min(max(0, budget) // one, useful)
    if pages < 1:
        raise MemoryError(
            f"no room for the KV cache: {free_bytes // _MIB} MiB free, {reserved // _MIB} MiB of it kept"
            f" for a step, one page needs {one} bytes"
        )
    room = Room(free_bytes, reserved, pages * one, one, pages, pages * settings.page_tokens)
    log.info(
        "kv cache",
        free_mib=free_bytes // _MIB,
        reserved_mib=reserved // _MIB,
        cache_mib=room.cache_bytes // _MIB,
        pages=pages,
        tokens=room.tokens,
        bytes_per_token=one // settings.page_tokens,
    )
    if room.tokens < loaded.context:
        log.warning("kv cache smaller than the context", tokens=room.tokens, context=loaded.context)
    return room


def _reserve(loaded: Any, settings: WorkerSettings) -> int:
    """Bytes that a step needs besides weights and cache: logits with the sampler's copies, activations."""
    text = loaded.config.get_text_config()
    logits = settings.slots * loaded.vocab * 4 * 4  # float32, sorted and masked copies
    widest = max(text.hidden_size * 8, getattr(text, "intermediate_size", None) or 0)
    activations = settings.tokens_per_step(loaded.device.type) * widest * 4 * loaded.dtype.itemsize
    graphs = 512 * _MIB if loaded.device.type == "cuda" else 0
    return logits + activations + graphs


def _free_bytes(device: torch.device, settings: WorkerSettings) -> int:
    if device.type == "cpu":
        return host_available_bytes()
    free, total = torch.cuda.mem_get_info(device)
    # What others have taken counts as taken; ours included, so the fraction is of the whole device.
    return int(free - (1 - settings.memory_fraction) * total)
