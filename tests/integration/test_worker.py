"""The real worker process: registers after a token, drains, survives the broker, says why it can't start."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from broker.client import Client
from broker.errors import InvalidRequest
from tests.pool import Pool, running_pool, wait_for

LOAD_S = 90.0
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def start_worker(pool: Pool, name: str, model: Path | str = "", *flags: str) -> int:
    """Start a worker, wait until it is registered; returns its pid."""
    command = ["-m", "gpu_worker", "--device", "cpu", "--name", name, "--no-compile", "--threads", "1"]
    process = pool.start(name, *command, "--model", str(model), *flags)
    wait_for(lambda: pool.worker(name, process.pid), f"worker {name}", LOAD_S)
    return process.pid


def tiny_flags() -> list[str]:
    return ["--dtype", "float32", "--kv-cache-mib", "64"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Pool]:
    """A pool with the demo model, shared by the tests that only ask it."""
    with running_pool() as pool:
        pool.broker()
        start_worker(pool, "cpu0")
        yield pool


@pytest.fixture
def client(demo: Pool) -> Iterator[Client]:
    with demo.client() as made:
        yield made


def test_the_demo_model_knows_the_capital_of_france(client: Client) -> None:
    assert "Paris" in client.chat(FRANCE, temperature=0, max_tokens=20).text
    with client.stream(messages=FRANCE, temperature=0, max_tokens=20) as stream:
        assert "Paris" in "".join(chunk.text for chunk in stream)


def test_a_completion_goes_on_with_its_prompt(client: Client) -> None:
    answer = client.generate("The capital of France is", temperature=0, max_tokens=6)
    assert answer.text.startswith(" Paris")
    assert answer.usage.prompt_tokens == 5


def test_tokens_and_text_go_both_ways(client: Client) -> None:
    ids = client.tokenize("hello world")
    assert client.detokenize(ids) == "hello world"


def test_a_seed_gives_the_same_answer_again(client: Client) -> None:
    texts = {client.generate("Once", seed=11, max_tokens=12, temperature=1).text for _ in range(2)}
    assert len(texts) == 1


def test_an_answer_under_a_schema_is_that_json(client: Client) -> None:
    schema = {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"], "additionalProperties": False,
    }  # fmt: skip
    grammar = {"kind": "json_schema", "value": json.dumps(schema)}
    answer = client.chat(FRANCE, temperature=0, max_tokens=60, grammar=grammar)
    assert set(json.loads(answer.text)) == {"city"}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"token_ids": [10_000_000]}, "token_ids"),
        ({"prompt": "x", "max_tokens": 100_000}, "max_tokens"),
        ({"prompt": "x", "stop_token_ids": [999_999]}, "stop_token_ids"),
        ({"prompt": "x", "logit_bias": {99_999_999: 5.0}}, "logit_bias"),
        ({"prompt": "x", "grammar": {"kind": "regex", "value": "("}}, "grammar"),
    ],
)
def test_c46_what_the_model_must_not_see_is_refused_by_name(
    client: Client, request_: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(**request_)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert client.generate("1 2 3", temperature=0, max_tokens=2).text


def test_c51_an_idle_worker_costs_nothing(demo: Pool, client: Client) -> None:
    client.generate("x", max_tokens=1)
    process = psutil.Process(demo.processes["cpu0"].pid)
    before = process.cpu_times()
    time.sleep(3)  # the measurement itself, not a wait
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.15


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantised_weights_answer_too(pool: Pool, quantization: str) -> None:
    pool.broker()
    start_worker(pool, "q", "", "--quantization", quantization)
    with pool.client() as client:
        assert client.models()[0].quantization == quantization
        assert "Paris" in client.chat(FRANCE, temperature=0, max_tokens=16, timeout_s=100).text


def test_a_stream_goes_on_after_its_worker_was_killed_with_the_same_text(pool: Pool, tiny: Path) -> None:
    pool.broker()
    start_worker(pool, "w0", tiny, *tiny_flags())
    with pool.client() as client:
        asked = {"prompt": "hello world", "max_tokens": 400, "seed": 3, "ignore_eos": True}
        undisturbed = client.generate(**asked).text  # type: ignore[arg-type]
        start_worker(pool, "w1", tiny, *tiny_flags())
        with client.stream(**asked) as stream:  # type: ignore[arg-type]
            texts = []
            for chunk in stream:
                texts.append(chunk.text)
                if len(texts) == 20:
                    victim = next(w.name for w in pool.status().workers if w.in_hand)
                    pool.kill(victim)
    assert "".join(texts) == undisturbed
    assert stream.done is not None and stream.done.attempts == 2


def test_a_model_that_can_not_be_paged_is_served_one_request_at_a_time(pool: Pool, tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    from tests.unit.gpu_worker.tokenizers import byte_level

    config = MambaConfig(vocab_size=330, hidden_size=32, state_size=8, num_hidden_layers=2, eos_token_id=None)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    pool.broker()
    start_worker(pool, "w0", tmp_path, *tiny_flags(), "--max-context", "256")
    found = pool.worker("w0")
    assert found is not None and found.slots == 1
    assert "layers of type linear_attention" in pool.log("w0")
    with pool.client() as client:
        asked = {"prompt": "hello", "max_tokens": 30, "seed": 3, "ignore_eos": True}
        alone = client.generate(**asked).text  # type: ignore[arg-type]
        streams = [client.stream(**asked) for _ in range(4)]  # type: ignore[arg-type]
        assert ["".join(chunk.text for chunk in stream) for stream in streams] == [alone] * 4


def test_a_worker_that_started_before_its_broker_registers_when_that_comes(pool: Pool, tiny: Path) -> None:
    command = ["-m", "gpu_worker", "--device", "cpu", "--name", "w0", "--no-compile", "--threads", "1"]
    process = pool.start("w0", *command, "--model", str(tiny), *tiny_flags())
    wait_for(lambda: '"defaults"' in pool.log("w0"), "the model to be loaded", LOAD_S)
    pool.broker()
    wait_for(lambda: pool.worker("w0", process.pid), "the worker to register", LOAD_S)


def test_sigterm_while_it_loads_ends_a_worker_at_once(pool: Pool, tiny: Path) -> None:
    command = ["-m", "gpu_worker", "--device", "cpu", "--name", "w0", "--no-compile"]
    process = pool.start("w0", *command, "--model", str(tiny), *tiny_flags())
    wait_for(lambda: '"device"' in pool.log("w0"), "the start")
    process.terminate()
    assert process.wait(5) == 0


def test_c67_a_worker_registers_again_with_a_restarted_broker(pool: Pool, tiny: Path) -> None:
    pool.broker()
    pid = start_worker(pool, "w0", tiny, *tiny_flags())
    pool.kill("broker")
    pool.broker()
    wait_for(lambda: pool.worker("w0", pid), "the worker to register again", 5.0)
    with pool.client() as client:
        assert client.generate("x", max_tokens=3, temperature=0).usage.completion_tokens == 3


def test_c90_sigterm_lets_a_worker_finish_and_exit_cleanly(pool: Pool, tiny: Path) -> None:
    pool.broker()
    start_worker(pool, "w0", tiny, *tiny_flags())
    with pool.client() as client, client.stream("x", max_tokens=600, seed=1, ignore_eos=True) as stream:
        chunks = iter(stream)
        next(chunks)
        pool.processes["w0"].send_signal(signal.SIGTERM)
        rest = sum(len(chunk.token_ids) for chunk in chunks)
    assert rest == 599
    assert stream.done is not None and stream.done.attempts == 1
    assert pool.processes.pop("w0").wait(10) == 0


def test_past_its_grace_a_worker_hands_back_and_another_goes_on(pool: Pool, tiny: Path) -> None:
    pool.broker()
    start_worker(pool, "w0", tiny, *tiny_flags(), "--drain-grace-s", "0.2")
    with pool.client() as client:
        asked = {"prompt": "x", "max_tokens": 1500, "seed": 1, "ignore_eos": True}
        with client.stream(**asked) as stream:  # type: ignore[arg-type]
            chunks = iter(stream)
            had = [next(chunks)]
            start_worker(pool, "w1", tiny, *tiny_flags())
            assert pool.stop("w0") == 0
            had += list(chunks)
        assert [c.start for c in had] == sorted({c.start for c in had})
        assert "".join(c.text for c in had) == client.generate(**asked).text  # type: ignore[arg-type]


def test_c69_a_busy_worker_is_not_taken_for_dead(pool: Pool, tiny: Path) -> None:
    """One step of a long prompt takes longer than the liveness: beats come from another thread."""
    pool.broker()
    start_worker(pool, "w0", tiny, *tiny_flags(), "--step-tokens", "2048", "--slots", "256")
    with pool.client() as client:
        prompt = list(range(3, 300)) * 5
        streams = [
            client.stream(token_ids=prompt, max_tokens=100, seed=i, ignore_eos=True) for i in range(24)
        ]
        for stream in streams:
            assert sum(len(c.token_ids) for c in stream) == 100
    status = pool.status()
    assert (status.worker_deaths, status.stray) == (0, 0)


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (["--quantization", "nf4", "--max-context", "99999"], 3, "--max-context 99999"),
        (["--model", "/nowhere"], 3, "no folder /nowhere"),
        (["--device", "gpu7"], 4, "--device gpu7"),
        (["--device", "cuda:0"], 4, "no CUDA device is visible"),
        (["--slots", "0"], 2, "--slots"),
        (["--workers", "tcp://192.0.2.1:5555"], 2, "--curve-keys"),
    ],
)
def test_a_worker_that_can_not_start_says_why_in_one_line(
    pool: Pool, tiny: Path, flags: list[str], code: int, why: str
) -> None:
    base = ["-m", "gpu_worker", "--model", str(tiny), "--device", "cpu", "--no-compile", *tiny_flags()]
    process = pool.start("w0", *base, *flags, CUDA_VISIBLE_DEVICES="")
    assert process.wait(LOAD_S) == code
    last = pool.log("w0").strip().splitlines()[-1]
    assert last.startswith("python -m gpu_worker: ") and why in last
    assert "Traceback" not in pool.log("w0")


def test_c63_a_living_workers_name_is_refused_with_the_reason(pool: Pool, tiny: Path) -> None:
    pool.broker()
    start_worker(pool, "w0", tiny, *tiny_flags())
    base = ["-m", "gpu_worker", "--model", str(tiny), "--device", "cpu", "--no-compile", *tiny_flags()]
    second = pool.start("w0-again", *base, "--name", "w0")
    assert second.wait(LOAD_S) == 5
    assert "alive" in pool.log("w0-again")
    with pool.client() as client:
        assert client.generate("x", max_tokens=1).worker == "w0"


def test_c63_a_killed_worker_is_replaced_under_its_name_within_one_liveness(pool: Pool, tiny: Path) -> None:
    pool.broker()
    pid = start_worker(pool, "w0", tiny, *tiny_flags())
    pool.kill("w0")
    again = start_worker(pool, "w0", tiny, *tiny_flags())
    assert again != pid
    with pool.client() as client:
        assert client.generate("x", max_tokens=1).worker == "w0"
