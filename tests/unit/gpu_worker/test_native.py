"""Building our kernels, and doing without."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from broker.logs import Log
from gpu_worker import native
from gpu_worker.attention import gathered
from gpu_worker.native import BuildFailed
from gpu_worker.runner import Runner
from gpu_worker.settings import WorkerSettings

from . import tiny_models


def test_what_was_built_is_used_again() -> None:
    directory = native.cache_directory("")
    library = native.load(directory)
    assert library.parent == directory
    assert native.load(directory) == library


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler on PATH"):
        native.load(tmp_path)


def test_a_compilers_refusal_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such flag" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildFailed, match="no such flag"):
        native.load(tmp_path)
    assert not list(tmp_path.glob("*.so"))


def test_a_worker_without_a_compiler_serves_by_torchs_own_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model, lines = tiny_models.build("llama"), io.StringIO()
    prompt = tiny_models.prompts(1)[0]
    expected = tiny_models.generated(model, prompt, 5)
    settings = WorkerSettings(kv_cache_mib=1, cache_dir=str(tmp_path))

    runner = Runner(tiny_models.loaded(model), settings, Log("worker/test", stream=lines))

    assert runner._attend is gathered.attend
    assert "no C++ compiler" in lines.getvalue()
    loop = tiny_models.Loop(runner)
    sequence = loop.join(prompt)
    for _ in range(5):
        loop.step([sequence])
    assert sequence.token_ids == expected
