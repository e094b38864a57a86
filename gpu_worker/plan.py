"""`python -m gpu_worker plan`: what fits on which device, from the model's config alone.

python -m gpu_worker plan --model PATH
python -m gpu_worker plan --model PATH --device-memory 16GiB --capability 7.0 --devices 2
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from broker.logs import Log

GIB: Final = 1024**3
MIB: Final = 1024**2
QUANTIZATIONS: Final = ("none", "int8", "nf4")
#: Bytes per weight of a quantised linear layer. NF4: half a byte, and per block of 64 weights a scale of
#: 8 bits, itself in blocks of 256 with a float32 (Dettmers et al., *QLoRA*, 2023). int8: a byte, and a
#: float32 per row, which is too little to count.
BYTES_PER_WEIGHT: Final = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
STEP_BYTES: Final = 512 * MIB  # for activations, logits and captured graphs
MEMORY_FRACTION: Final = 0.9
HOST_SHARE: Final = 0.4  # as in `kv_cache`
HOST_MOST_BYTES: Final = 4 * GIB
TYPICAL_REQUEST_TOKENS: Final = 1024
EXIT_NO_MODEL: Final = 3
_SIZE: Final = re.compile(r"^(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)?$")
_UNITS: Final = {"GiB": GIB, "GB": 10**9, "MiB": MIB, "MB": 10**6, None: 1}


@dataclass(frozen=True, slots=True)
class Device:
    """A device to plan for."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None  # None: a CPU
    bfloat16: bool

    @property
    def dtype(self) -> str:
        """What the worker would compute in: bfloat16 from compute capability 8.0 on, float16 before."""
        if self.capability is not None:
            return "bfloat16" if self.capability >= (8, 0) else "float16"
        return "bfloat16" if self.bfloat16 else "float32"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model needs.

    Attributes:
        linear_weights: weights in layers that quantisation shrinks.
        other_weights: embeddings, norms and output head, which stay as they are.
        kv_values_per_token: keys and values of one token over all layers, in numbers; 0 without attention.
        context: tokens.
        one_at_a_time: why the model is served one request at a time; empty if it isn't.
    """

    linear_weights: int
    other_weights: int
    kv_values_per_token: int
    context: int
    one_at_a_time: str = ""

    def weights_bytes(self, quantization: str, item_bytes: int) -> int:
        """Memory of the weights."""
        per_linear = BYTES_PER_WEIGHT.get(quantization, float(item_bytes))
        return int(self.linear_weights * per_linear) + self.other_weights * item_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """What one way to run a model comes to."""

    device: Device
    quantization: str
    devices: int  # that the model is spread over
    weights_bytes: int
    kv_bytes_per_token: int
    tokens: int  # that the cache holds
    requests: int  # of `TYPICAL_REQUEST_TOKENS`

    @property
    def fits(self) -> bool:
        """Whether at least one request of typical length can run."""
        return self.requests >= 1


def measure(config: Any, max_context: int = 0) -> Sizes:
    """Count a model's weights on torch's meta device: shapes only, no memory.

    Args:
        config: a transformers config of a causal language model.
        max_context: the longest prompt + output to be served, in tokens; 0: what the config says.

    Raises:
        LoadError: the config names no context, or a shorter one.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from .loading import context_of

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = {
        id(module.weight): module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    every = {id(weight): weight.numel() for weight in model.parameters()}
    text = config.get_text_config()
    context = context_of(text, max_context)
    return Sizes(
        linear_weights=sum(linear.values()),
        other_weights=sum(every.values()) - sum(linear.values()),
        kv_values_per_token=_kv_values(text),
        context=context,
        one_at_a_time=_why_one_at_a_time(config, context),
    )


def _kv_values(text: Any) -> int:
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 0
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * kv_heads * head_dim)


def _why_one_at_a_time(config: Any, context: int) -> str:
    """What the config gives away; a worker that loads the model may find more."""
    from .support import NotPaged, check_config

    try:
        check_config(config, context)
    except NotPaged as reason:
        return reason.feature
    return "" if _kv_values(config.get_text_config()) else "it has no attention layers"


def fit(sizes: Sizes, device: Device, quantization: str, devices: int = 1) -> Fit:
    """What a device, or several that the model is spread over, can do in one quantisation."""
    item_bytes = 4 if device.dtype == "float32" else 2
    weights = sizes.weights_bytes(quantization, item_bytes)
    per_token = sizes.kv_values_per_token * item_bytes
    if device.capability is None:
        # As the worker does: a host has other things to do, so the cache gets only a part.
        room = int(min(HOST_SHARE * (device.memory_bytes - weights - STEP_BYTES), HOST_MOST_BYTES))
    else:
        room = int(devices * (device.memory_bytes * MEMORY_FRACTION - STEP_BYTES)) - weights
    tokens = max(0, room // per_token) if per_token else sizes.context * (room > 0)
    requests = tokens // min(TYPICAL_REQUEST_TOKENS, sizes.context)
    return Fit(
        device=device, quantization=quantization, devices=devices, weights_bytes=weights,
        kv_bytes_per_token=per_token, tokens=tokens,
        requests=min(requests, 1) if sizes.one_at_a_time else requests,
    )  # fmt: skip


def recommend(fits: Sequence[Fit]) -> str:
    """The settings to begin with, in words and flags: the least quantisation that leaves room for a batch."""
    single = [f for f in fits if f.devices == 1]
    good = [f for f in single if f.requests >= 4] or [f for f in single if f.fits]
    spread = [f for f in fits if f.devices > 1 and f.fits]
    if good:
        best = good[0]
        slots = max(1, min(64, best.requests))
        return (
            f"one worker per device, each with its own copy: --quantization {best.quantization}"
            f" --dtype {best.device.dtype} --slots {slots}"
        )
    if spread:
        best = spread[0]
        names = ",".join(map(str, range(best.devices)))
        return (
            f"one model over {best.devices} devices, one request at a time: --device {names}"
            f" --quantization {best.quantization} --dtype {best.device.dtype}"
        )
    return "it doesn't fit: a smaller model, or more memory"


def parse_size(text: str) -> int:
    """Bytes of ``16GiB``, ``24GB``, ``800MiB``.

    Raises:
        ValueError: it is none of these.
    """
    match = _SIZE.match(text.strip())
    if not match:
        raise ValueError(f"expected a size such as 16GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_capability(text: str) -> tuple[int, int]:
    """Compute capability of ``7.0``.

    Raises:
        ValueError: it isn't two numbers.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if not match:
        raise ValueError(f"expected a compute capability such as 7.0, got {text!r}")
    return int(match[1]), int(match[2])


def parse_count(text: str) -> int:
    """A number that is at least 1.

    Raises:
        argparse.ArgumentTypeError: it isn't.
    """
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number, at least 1, got {text!r}")
    return int(text)


def local_devices() -> list[Device]:
    """The GPUs of this machine, or its CPU."""
    import torch

    from .kv_cache import host_available_bytes
    from .loading import cpu_has_bfloat16

    if not torch.cuda.is_available():
        return [Device("cpu", host_available_bytes(), None, cpu_has_bfloat16())]
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        Device(f"cuda:{i} {p.name}", p.total_memory, (p.major, p.minor), True) for i, p in enumerate(found)
    ]


def report(name: str, sizes: Sizes, fits: Sequence[Fit]) -> str:
    """The table for people."""
    weights = (sizes.linear_weights + sizes.other_weights) / 1e6
    alone = [f"one request at a time: {sizes.one_at_a_time}"] if sizes.one_at_a_time else []
    lines = [
        f"{name}: {weights:,.0f} M weights, context {sizes.context}",
        *alone,
        "",
        f"{'device':<28} {'quantization':<13} {'dtype':<9} {'weights':>10} {'KV/token':>10} {'tokens':>10}"
        f" {f'requests of {TYPICAL_REQUEST_TOKENS}':>17}",
    ]
    for f in fits:
        where = f.device.name if f.devices == 1 else f"{f.devices} × {f.device.name}"
        lines.append(
            f"{where:<28} {f.quantization:<13} {f.device.dtype:<9} {f.weights_bytes / GIB:>6.2f} GiB"
            f" {f.kv_bytes_per_token / 1024:>6.0f} KiB {f.tokens:>10,} {f.requests:>17,}"
            f"{'' if f.fits else '   does not fit'}"
        )
    return "\n".join([*lines, "", f"recommended: {recommend(fits)}"])


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = _parser().parse_args(argv)
    from .loading import LoadError
    from .weights import one_sentence

    try:
        devices = _devices(args)
        with one_sentence("the config", Log("plan")):
            name, config = _config(args.model)
            sizes = measure(config, args.max_context)
    except (LoadError, ValueError) as problem:
        print(f"python -m gpu_worker plan: {problem}", file=sys.stderr)
        return EXIT_NO_MODEL
    fits = [fit(sizes, device, q) for device in dict.fromkeys(devices) for q in QUANTIZATIONS]
    if len(devices) > 1:
        fits += [fit(sizes, devices[0], q, len(devices)) for q in QUANTIZATIONS]
    print(report(name, sizes, fits))
    return 0


def _config(given: str) -> tuple[str, Any]:
    from transformers import AutoConfig

    from . import loading
    from .source import check_model

    given = given or loading.demo_model()
    check_model(given)
    if given.endswith(".gguf"):
        path = Path(given)
        return path.stem, AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    return loading.name_of(given), AutoConfig.from_pretrained(given)


def _devices(args: argparse.Namespace) -> list[Device]:
    if not args.device_memory:
        return local_devices()
    capability = parse_capability(args.capability)
    name = f"GPU {args.device_memory} sm {args.capability}"
    return [Device(name, parse_size(args.device_memory), capability, capability >= (8, 0))] * args.devices


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_worker plan", description="What fits on which device, without loading the model."
    )
    parser.add_argument(
        "--model", default=os.environ.get("LOADONCE_MODEL", ""), help="folder, GGUF file or hub id"
    )
    parser.add_argument("--device-memory", default="", help="of a device that isn't here, such as 16GiB")
    parser.add_argument("--capability", default="8.0", help="its compute capability, such as 7.0")
    parser.add_argument("--devices", type=parse_count, default=1, help="how many of them")
    parser.add_argument("--max-context", type=parse_count, default=0, help="tokens, as for the worker")
    return parser
