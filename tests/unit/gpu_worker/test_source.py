"""A wrong model path is refused by its look, before anything heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.source import LoadError, check_model


def test_a_folder_with_a_config_a_gguf_file_and_a_hub_id_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "m.gguf").touch()
    check_model(str(tmp_path))
    check_model(str(tmp_path / "m.gguf"))
    check_model("meta-llama/Llama-2-13b-chat-hf")


@pytest.mark.parametrize("given", ["/no/such/folder", "./nowhere", "word", "a/b/c", "no/such.gguf"])
def test_what_is_not_there_is_named(given: str) -> None:
    with pytest.raises(LoadError, match=given):
        check_model(given)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="config.json"):
        check_model(str(tmp_path))


def test_the_worker_says_so_in_one_line_before_it_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from gpu_worker.__main__ import main; code = main(['--model', '/no/such/model']);"
        " sys.exit(99 if 'torch' in sys.modules else code)"
    )
    environment = {**os.environ, "LOADONCE_RUN_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert done.stderr.strip().splitlines() == [
        "python -m gpu_worker: --model: there is no folder /no/such/model, and it is no hub id (owner/name)"
    ]
