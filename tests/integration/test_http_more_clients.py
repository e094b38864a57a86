"""litellm and langchain-openai, in an environment of their own that `make test-clients` installs."""

from __future__ import annotations

import json
import subprocess

import pytest

from examples.scripted_worker import scripted
from tests.integration.http_serving import http_pool
from tests.pool import ROOT

PYTHON = ROOT / "benchmarks" / ".venv-clients" / "bin" / "python"


@pytest.mark.skipif(not PYTHON.exists(), reason="`make test-clients` installs litellm and langchain-openai")
def test_a_round_trip_of_each_whole_and_streamed() -> None:
    with http_pool(worker=("--steps-per-s", "500")) as served:
        said = subprocess.run(
            [PYTHON, "tests/integration/more_clients.py", f"{served.url}/v1"],
            cwd=ROOT, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert said.returncode == 0, said.stderr[-3000:]
        found = json.loads(said.stdout.strip().splitlines()[-1])
        text = "".join(scripted("hi", 3, 5))
        assert found["litellm"] == {"whole": text, "streamed": text, "refused": "NotFoundError"}
        assert found["langchain"] == {"whole": text, "streamed": text, "usage": 5}
