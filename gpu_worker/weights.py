"""Reads a model's tokenizer and weights from a folder: all of them, straight to their device, never a pickle.

Whatever the libraries make of broken files becomes one sentence. Knows nothing of where they come from.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from broker.logs import Log

from .settings import WorkerSettings
from .source import LoadError


def read_tokenizer(folder: str, settings: WorkerSettings, log: Log) -> Any:
    """The fast tokenizer of a model.

    Raises:
        LoadError: there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    with one_sentence("the tokenizer", log):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    if not tokenizer.is_fast:
        raise LoadError("the model has no fast tokenizer (tokenizer.json), and only those are served")
    return tokenizer


def read_model(
    folder: str, settings: WorkerSettings, device: torch.device, dtype: torch.dtype, log: Log
) -> Any:
    """The model with its weights on the device.

    Raises:
        LoadError: it can't be read, it has weights that the files don't give, or there is no room.
    """
    from transformers import AutoModelForCausalLM

    _check_generation_config(Path(folder))
    placement: Any = "auto" if "," in settings.device else {"": device}
    with one_sentence("the model", log, device):
        # Straight to its device: moving a quantised model afterwards is an error.
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map=placement,
            quantization_config=_quantisation(settings, dtype),
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # we say it ourselves
            output_loading_info=True,
        )
    check_complete(found, log)
    return model


def check_complete(found: dict[str, Any], log: Log) -> None:
    """Refuse a model that transformers has filled up with random weights.

    Args:
        found: what `from_pretrained` says of the tensors in the files.
        log: gets what isn't used.

    Raises:
        LoadError: a tensor is missing or has another shape.
    """
    if found["mismatched_keys"]:
        name, given, wanted = min(found["mismatched_keys"], key=str)
        raise LoadError(
            f"the weights aren't those of config.json: {name} is {tuple(given)} and should be {tuple(wanted)}"
        )
    if found["missing_keys"]:
        name, count = min(found["missing_keys"]), len(found["missing_keys"])
        raise LoadError(f"the weights aren't complete: {count} tensors are missing, such as {name}")
    if found["unexpected_keys"]:
        log.warning(
            "weights unused", tensors=len(found["unexpected_keys"]), such_as=min(found["unexpected_keys"])
        )


def _check_generation_config(folder: Path) -> None:
    """The library passes over a file that it can't read, and so over the model's end tokens and defaults."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    try:
        readable = isinstance(json.loads(path.read_bytes()), dict)
    except ValueError:
        readable = False
    if not readable:
        raise LoadError("the model can't be loaded: generation_config.json is no JSON object")


def _quantisation(settings: WorkerSettings, dtype: torch.dtype) -> Any:
    if settings.quantization == "none":
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise LoadError(f"--quantization {settings.quantization} needs bitsandbytes, which isn't installed")
    from transformers import BitsAndBytesConfig

    if settings.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


@contextmanager
def one_sentence(what: str, log: Log, device: torch.device | None = None) -> Iterator[None]:
    """Whatever is raised within becomes a `LoadError` about `what`."""
    try:
        yield
    except LoadError:
        raise
    except (torch.OutOfMemoryError, MemoryError):
        raise LoadError(f"{what} doesn't fit into {device}: try --quantization nf4") from None
    except Exception as problem:  # noqa: BLE001 - broken files make libraries raise anything at all
        log.debug("can't be loaded", what=what, exception=repr(problem))
        raise LoadError(f"{what} can't be loaded: {first_line(problem)}") from None


def first_line(problem: BaseException) -> str:
    """What went wrong in one line, the exception's name included where its text alone says nothing."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    if not said or isinstance(problem, KeyError | TypeError | AttributeError | AssertionError | IndexError):
        said = f"{type(problem).__name__} {said}".strip()
    return said.rstrip(",")
