"""A pool for each test that asks for one, and a tiny model for all that want a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import Pool, running_pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    """An empty pool: the test starts what it needs."""
    with running_pool() as running:
        yield running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama on disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.unit.gpu_worker.tokenizers import byte_level

    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        vocab_size=330, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder
