"""Whether `--model` can name a model, by its shape and the file system: no torch, so the answer is quick."""

from __future__ import annotations

from pathlib import Path


class LoadError(Exception):
    """The model can't be loaded as the settings say; one sentence for the operator."""


def check_model(given: str) -> None:
    """See that `--model` is a GGUF file or a folder that is there, or looks like a hub id.

    Raises:
        LoadError: it is none of them.
    """
    path = Path(given).expanduser()
    if given.endswith(".gguf"):
        if not path.is_file():
            raise LoadError(f"--model: there is no file {given}")
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadError(f"--model: {given} has no config.json")
    elif path.is_absolute() or given.startswith(".") or given.count("/") != 1:
        raise LoadError(f"--model: there is no folder {given}, and it is no hub id (owner/name)")
