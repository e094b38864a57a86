"""The compiled step: the same answers, made in another process, and never waited for."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from broker.logs import Log
from gpu_worker import compiled, native
from gpu_worker.compiled import CompileFailed
from gpu_worker.runner import Runner
from gpu_worker.settings import WorkerSettings

from . import tiny_models

DEADLINE_S = 280


def runner(model: Any, cache_dir: Path, lines: io.StringIO | None = None) -> Runner:
    # The kernels come from the shared cache, or each test would build them again.
    directory = native.cache_directory(str(cache_dir))
    if not list(directory.glob("kernels-*.so")):
        library = native.load(native.cache_directory(""))
        (directory / library.name).hardlink_to(library)
    settings = WorkerSettings(kv_cache_mib=1, page_tokens=8, cache_dir=str(cache_dir))
    return Runner(tiny_models.loaded(model), settings, Log("worker/test", stream=lines or io.StringIO()))


def tokens_of(runner: Runner, prompts: list[list[int]], count: int) -> list[list[int]]:
    loop = tiny_models.Loop(runner)
    sequences = [loop.join(prompt) for prompt in prompts]
    for _ in range(count):
        loop.step(sequences)
    return [sequence.token_ids for sequence in sequences]


def wait_for_compile(runner: Runner) -> None:
    until = time.monotonic() + DEADLINE_S
    while runner._compiled is None:
        assert time.monotonic() < until, "nothing compiled in time"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_the_compiled_step_says_what_generate_says(architecture: str, tmp_path: Path) -> None:
    model = tiny_models.build(architecture)
    prompts = tiny_models.prompts(5)
    expected = [tiny_models.generated(model, prompt, 8) for prompt in prompts]
    ours = runner(model, tmp_path)

    ours.start_compile()
    eagerly = tokens_of(ours, prompts, 8)
    wait_for_compile(ours)
    compiledly = tokens_of(ours, prompts, 8)
    alone = tokens_of(ours, prompts[:1], 8)

    assert eagerly == expected
    assert compiledly == expected
    assert alone == expected[:1]
    again = runner(model, tmp_path)
    again.start_compile()
    assert again._compiled is not None, "what is on disk is used at once"
    assert tokens_of(again, prompts, 8) == expected


def test_a_compile_that_fails_leaves_the_worker_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CompileFailed("exit code 1: boom")

    monkeypatch.setattr(compiled, "start", lambda *_: None)
    monkeypatch.setattr(compiled, "finish", fail)
    model, lines = tiny_models.build("llama"), io.StringIO()
    prompts = tiny_models.prompts(2)
    expected = [tiny_models.generated(model, prompt, 3) for prompt in prompts]
    ours = runner(model, tmp_path, lines)

    ours.start_compile()
    until = time.monotonic() + 10
    while "boom" not in lines.getvalue():
        assert time.monotonic() < until
        time.sleep(0.01)

    assert tokens_of(ours, prompts, 3) == expected


def test_a_step_that_disagrees_with_the_eager_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def __init__(self, *_: object) -> None: ...

        def __call__(self, inputs: list[torch.Tensor], caches: object) -> torch.Tensor:
            return torch.ones(inputs[-1].shape[0], tiny_models.VOCAB)

    monkeypatch.setattr(compiled, "CompiledStep", Wrong)
    ours = runner(tiny_models.build("llama"), tmp_path)
    with pytest.raises(CompileFailed, match="off by"):
        ours._open(tmp_path / "step.so")
    assert ours._compiled is None


def test_a_name_stands_for_one_model(tmp_path: Path) -> None:
    llama = runner(tiny_models.build("llama"), tmp_path)._job().key()
    assert runner(tiny_models.build("llama", seed=5), tmp_path)._job().key() == llama, "weights don't matter"
    assert runner(tiny_models.build("qwen2"), tmp_path)._job().key() != llama
    assert runner(tiny_models.build("llama", num_hidden_layers=2), tmp_path)._job().key() != llama


def test_no_compile_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("compiled all the same")

    monkeypatch.setattr(compiled, "start", never)
    settings = WorkerSettings(kv_cache_mib=1, compile=False)
    model = tiny_models.loaded(tiny_models.build("llama"))
    Runner(model, settings, Log("worker/test", stream=io.StringIO())).start_compile()
