"""OpenAI's own JavaScript client: the scenarios of `node/scenarios.mjs` against a real pool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.scripted_worker import scripted
from tests.integration.http_serving import HttpPool, http_pool
from tests.pool import wait_for

HERE = Path(__file__).resolve().parent / "node"


@pytest.fixture(scope="module")
def served() -> Iterator[HttpPool]:
    with http_pool(worker=("--steps-per-s", "500", "--slots", "64")) as one:
        yield one


@pytest.fixture(scope="module")
def results(served: HttpPool) -> dict[str, Any]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    if not (HERE / "node_modules" / "openai").is_dir():
        got = subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=HERE, capture_output=True, text=True)
        if got.returncode:
            pytest.skip(f"npm can't get the client: {got.stderr.strip()[-200:]}")
    said = subprocess.run(
        [node, "scenarios.mjs"],
        cwd=HERE, env={**os.environ, "BASE_URL": f"{served.url}/v1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    return {one["name"]: one["result"] for one in map(json.loads, said.stdout.splitlines())}


def words(prompt: str, seed: int, count: int) -> str:
    return "".join(scripted(prompt, seed, count))


def expected() -> dict[str, Any]:
    """What each scenario finds."""
    hi = words("hi", 3, 5)
    return {
        "chat": {"text": hi, "usage": 5, "id": True},
        "chat_stream": {"text": hi, "usage": 5, "roles": 1},
        "choices": {"indices": [0, 1, 2], "different": 3},
        "completions": {"texts": [words("a", 9, 4), words("b", 9, 4)]},
        "completion_stream": {"text": words("a", 9, 4)},
        "models": {"ids": ["scripted", "scripted-alias"], "one": "scripted"},
        "not_found": {"class": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"},
        "bad_request": {"class": "BadRequestError", "status": 400, "param": "messages"},
        "error_in_a_stream": {"chunks": 4, "class": "APIError"},
        "timeout": {"class": "APIConnectionTimeoutError"},
        "leaves": {"chunks": 3},
        "many_at_once": {"own": True},
        "raw": {"id": "mine-5", "role": "assistant"},
    }


@pytest.mark.parametrize("name", expected())
def test_the_javascript_client(results: dict[str, Any], name: str) -> None:
    assert results[name] == expected()[name]


def test_the_worker_is_free_afterwards(served: HttpPool, results: dict[str, Any]) -> None:
    wait_for(lambda: served.running() == 0, "the worker to be free", 2.0)
