"""The worker's settings, each declared once; `broker.options` makes flags, environment and help of them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

_MIB = 1024 * 1024


#: On two cores a step of 256 tokens has nearly the rate of one of 512, in half the time.
CPU_STEP_TOKENS: Final = 256
GPU_STEP_TOKENS: Final = 512


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """Load a model once and serve it to the broker."""

    workers: Annotated[
        str, Meta(description="where the broker listens for workers; empty: in the run directory")
    ] = ""
    run_dir: Annotated[
        str, Meta(description="directory of the sockets and device locks; empty: one per user under /tmp")
    ] = ""
    name: Annotated[str, Meta(description="name in the pool; empty: made of the device", max_length=64)] = ""
    device: Annotated[
        str,
        Meta(description="auto, cpu, 0, cuda:1, a GPU or MIG UUID, or 0,1 for one model over two"),
    ] = "auto"
    share_device: Annotated[bool, Meta(description="let several workers use one device on purpose")] = False
    model: Annotated[
        str, Meta(description="a folder, a GGUF file, or a hub id; empty: the demo model, if it is installed")
    ] = ""
    revision: Annotated[
        str,
        Meta(
            description="commit of a hub model; a hub id without one is pinned to what was found, and logged"
        ),
    ] = ""
    model_name: Annotated[
        str, Meta(description="name that requests use; empty: taken from the model's path")
    ] = ""
    aliases: Annotated[str, Meta(description="more names for the model, separated by commas")] = ""
    quantization: Annotated[
        Literal["none", "nf4", "int8"],
        Meta(description="weights through bitsandbytes; nf4 is double-quantised"),
    ] = "none"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="auto: bfloat16 where the device can, float16 on older GPUs, float32 on older CPUs"),
    ] = "auto"
    trust_remote_code: Annotated[
        bool, Meta(description="run Python that comes with the model; off unless you read it")
    ] = False
    cache_dir: Annotated[
        str,
        Meta(description="where converted GGUF files and compiled code are kept; empty: ~/.cache/loadonce"),
    ] = ""
    max_context: Annotated[
        int, Meta(ge=0, description="longest prompt + output in tokens; 0: what the model's config says")
    ] = 0
    slots: Annotated[int, Meta(ge=1, le=4096, description="requests in hand at a time")] = 64
    step_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="tokens that one step may compute, running rows and prefill together;"
            " 0: 256 on a CPU, 512 on a GPU",
        ),
    ] = 0
    page_tokens: Annotated[int, Meta(ge=1, le=1024, description="tokens in one KV page")] = 16
    kv_cache_mib: Annotated[
        int, Meta(ge=0, description="KV cache in MiB; 0: from the device's free memory")
    ] = 0
    memory_fraction: Annotated[
        float, Meta(gt=0, le=1, description="share of the device's memory that weights and cache may take")
    ] = 0.9
    prefix_cache: Annotated[bool, Meta(description="reuse the KV pages of prompts that begin alike")] = True
    compile: Annotated[
        bool, Meta(description="compile the decode step in the background; eager until it is there")
    ] = True
    threads: Annotated[
        int, Meta(ge=0, description="CPU threads of the model; 0: all cores that it may use")
    ] = 0
    drain_grace_s: Annotated[
        float,
        Meta(ge=0, description="after SIGTERM: seconds to finish what is in hand; the rest is handed back"),
    ] = 20.0
    step_timeout_s: Annotated[
        float,
        Meta(gt=0, description="a step that takes longer than this has hung: the worker exits and restarts"),
    ] = 120.0
    memory_wait_s: Annotated[
        float, Meta(ge=0, description="how long a starting worker waits for its device's memory to be free")
    ] = 60.0
    curve_keys: Annotated[
        str, Meta(description="directory of CURVE keys; needed for any address but ipc and loopback")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level that is logged")
    ] = "info"
    log_prompts: Annotated[bool, Meta(description="write prompts and outputs into the log")] = False

    def tokens_per_step(self, device_type: str) -> int:
        """What one step may compute: on a CPU no more than keeps its units busy, as others wait meanwhile."""
        return self.step_tokens or (CPU_STEP_TOKENS if device_type == "cpu" else GPU_STEP_TOKENS)
