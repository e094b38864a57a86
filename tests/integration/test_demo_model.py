"""The demo model through the whole engine: its text is transformers' own."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from broker.logs import Log
from broker.protocol import ChatMessage, Grammar, Params, Request
from gpu_worker import loading
from gpu_worker.loading import LoadedModel
from gpu_worker.runner import Runner
from gpu_worker.settings import WorkerSettings
from tests.unit.gpu_worker import tiny_models
from tests.unit.gpu_worker.fakes import Bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEW_TOKENS = 12
BEGINNINGS = [
    "The capital of France is",
    "Once upon a time",
    "def fib(n):\n    ",
    "Water boils at",
    "1, 2, 3, 4,",
    "The quick brown fox",
    "In 1969, men",
    "Dear Sir or Madam,",
    "My favourite food is",
    "To be or not to be,",
]
PROMPTS = [*BEGINNINGS, *(beginning + " and after a while it was clear that" for beginning in BEGINNINGS)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    pytest.importorskip("llguidance")
    folder: Path = tmp_path_factory.mktemp("cache")
    settings = WorkerSettings(dtype="float32", cache_dir=str(folder))
    try:
        yield loading.load(settings, torch.device("cpu"), Log("worker/test", stream=io.StringIO()))
    except loading.LoadError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def expected(demo: LoadedModel) -> list[list[int]]:
    """What `generate` says, asked before a runner takes the model's attention over."""
    prompts = [demo.tokenizer.encode(prompt) for prompt in PROMPTS]
    eos, demo.model.generation_config.eos_token_id = demo.model.generation_config.eos_token_id, None
    answers = [tiny_models.generated(demo.model, prompt, NEW_TOKENS)[len(prompt) :] for prompt in prompts]
    demo.model.generation_config.eos_token_id = eos
    return answers


@pytest.fixture
def bench(demo: LoadedModel, expected: list[list[int]]) -> Bench:
    del expected
    settings = WorkerSettings(kv_cache_mib=256, compile=False)
    runner = Runner(demo, settings, Log("worker/test", stream=io.StringIO()))
    return Bench(runner, sampler=None, model=demo, slots=8, step_tokens=64)


def test_twenty_prompts_with_joins_and_leaves_get_what_generate_says(
    demo: LoadedModel, expected: list[list[int]], bench: Bench
) -> None:
    heard = []
    for number, prompt in enumerate(PROMPTS):
        heard.append(bench.submit(prompt, id=str(number), max_tokens=NEW_TOKENS, ignore_eos=True))
        bench.step()
    bench.finish()
    assert [one.token_ids for one in heard] == expected
    assert [one.text for one in heard] == [
        demo.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected
    ]


def test_a_conversation_ends_by_itself(bench: Bench) -> None:
    request = Request(
        messages=[ChatMessage("user", "What is 2+2? One word.")], params=Params(temperature=0, max_tokens=64)
    )
    heard = bench.ask(request=request)
    assert heard.outcome is not None and heard.outcome.finish_reason == "stop"
    assert heard.text.strip() and "<|im_end|>" not in heard.text


def test_a_schema_is_kept(bench: Bench) -> None:
    age = {"type": "integer", "minimum": 0, "maximum": 150}
    schema = {
        "type": "object",
        "properties": {"age": age},
        "required": ["age"],
        "additionalProperties": False,
    }
    request = Request(
        prompt="A person as JSON: ",
        params=Params(
            temperature=1.0, seed=4, max_tokens=60, grammar=Grammar("json_schema", json.dumps(schema))
        ),
    )
    heard = bench.ask(request=request)
    assert heard.outcome is not None and heard.outcome.finish_reason == "stop"
    answer = json.loads(heard.text)
    assert list(answer) == ["age"] and 0 <= answer["age"] <= 150
