"""How many pages there are, and what they are made of."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from broker.logs import Log
from gpu_worker import kv_cache
from gpu_worker.attention import LayerPlan
from gpu_worker.settings import WorkerSettings

MIB = 1024 * 1024
LAYER = LayerPlan(
    query_heads=4, kv_heads=2, key_dim=8, value_dim=4, scaling=1.0, window=0, softcap=0.0, sinks=False
)
PAGE = 2 * 2 * (8 + 4) * 16 * 2  # layers · heads · dims · tokens · bytes


def model(context: int = 1000) -> Any:
    text = SimpleNamespace(hidden_size=32, intermediate_size=64)
    return SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        context=context,
        vocab=100,
    )


def size(free: int, *, context: int = 1000, **settings: Any) -> tuple[kv_cache.Room, str]:
    lines = io.StringIO()
    chosen = WorkerSettings(**{"slots": 4, "step_tokens": 16, **settings})
    room = kv_cache.size(
        model(context), [LAYER, LAYER], chosen, Log("worker/test", stream=lines), free_bytes=free
    )
    return room, lines.getvalue()


def test_a_page_holds_keys_and_values_of_all_layers() -> None:
    assert kv_cache.page_bytes([LAYER, LAYER], 16, torch.bfloat16) == PAGE


def test_a_cpu_takes_a_share_of_what_is_free_and_says_how_much() -> None:
    room, log = size(MIB)
    assert room.pages == int(0.4 * (MIB - room.reserved_bytes)) // PAGE
    assert f'"pages": {room.pages}' in log


def test_a_setting_wins_over_what_is_free() -> None:
    assert size(0, kv_cache_mib=1, slots=64)[0].pages == MIB // PAGE


def test_no_more_pages_than_all_slots_can_fill_twice() -> None:
    assert size(1 << 40)[0].pages == 2 * 4 * 63


def test_no_room_for_a_page_is_an_error_with_the_numbers() -> None:
    with pytest.raises(MemoryError, match=f"0 MiB free.*one page needs {PAGE} bytes"):
        size(100)


def test_a_cache_below_the_context_is_warned_of() -> None:
    assert "kv cache smaller than the context" in size(MIB // 4, context=100_000)[1]


def test_pages_have_the_agreed_shape_and_one_more_for_nobody() -> None:
    [(keys, values)] = kv_cache.allocate([LAYER], 5, 16, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert keys.shape == (6, 16, 2, 8) and values.shape == (6, 16, 2, 4)
    assert keys[3, :, 1].is_contiguous()


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max\n", "1\n", 3000 * 1024), ("2048000\n", "1024000\n", 1024000), ("5\n", "9\n", 0)],
)
def test_the_control_groups_limit_counts(tmp_path: Path, limit: str, used: str, expected: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  3000 kB\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text(used)
    assert kv_cache.host_available_bytes(tmp_path) == expected
