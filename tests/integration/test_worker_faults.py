"""The real worker when its model hangs, when many ask at once, and when two start on one file."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from broker.errors import RequestFailed
from gpu_worker.__main__ import EXIT_USAGE
from gpu_worker.scratch import PREFIX
from tests.integration.hanging_worker import HANGS_ON
from tests.integration.test_worker import LOAD_S, start_worker, tiny_flags
from tests.pool import ROOT, Pool, wait_for

STALLED = 7  # the worker's exit code


def start_hanging(pool: Pool, name: str, model: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A worker whose step never returns when a prompt is `HANGS_ON`; waits until it is registered."""
    base = ["--device", "cpu", "--name", name, "--no-compile", "--threads", "1", "--model", str(model)]
    script = str(ROOT / "tests/integration/hanging_worker.py")
    process = pool.start(name, script, *base, *tiny_flags(), *flags)
    wait_for(lambda: pool.worker(name, process.pid), f"worker {name}", LOAD_S)
    return process


def test_a_request_that_hangs_two_workers_fails_and_what_was_beside_it_goes_on(
    pool: Pool, tiny: Path
) -> None:
    pool.broker()
    hanging = [start_hanging(pool, f"w{n}", tiny, "--step-timeout-s", "1.5") for n in range(2)]
    with pool.client() as client:
        asked = {"prompt": "hello world", "max_tokens": 300, "seed": 3, "ignore_eos": True}
        undisturbed = client.generate(**asked).text  # type: ignore[arg-type]
        streams = [client.stream(**asked) for _ in range(4)]  # type: ignore[arg-type]
        with pytest.raises(RequestFailed, match="brought down 2 workers"):
            client.generate(token_ids=HANGS_ON, max_tokens=3, seed=1)
        assert [process.wait(10) for process in hanging] == [STALLED, STALLED]
        assert "step hung" in pool.log("w0") and "step hung" in pool.log("w1")
        start_worker(pool, "w2", tiny, *tiny_flags())
        for stream in streams:
            assert "".join(chunk.text for chunk in stream) == undisturbed


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--workers", "tcp://127.0.0.1"), "workers: "),
        (("--workers", "gopher://x"), "workers: "),
        (("--workers", "tcp://192.0.2.1:5555"), "--curve-keys"),
        (("--workers", "tcp://127.0.0.1:5555", "--curve-keys", "no-such-folder"), "no-such-folder"),
        (("--run-dir", "/tmp/" + "x" * 120), "LOADONCE_RUN_DIR"),  # noqa: S108
    ],
)
def test_an_address_that_can_not_be_is_found_before_the_model_is_loaded(
    tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker", "--device", "cpu", "--model", "/nowhere", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=30,
        env={**os.environ, "LOADONCE_RUN_DIR": str(tmp_path)},
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert done.returncode == EXIT_USAGE
    assert named in line


def test_a_worker_that_is_told_to_go_while_it_converts_a_file_leaves_nothing(
    pool: Pool, tmp_path: Path
) -> None:
    command = ["-m", "gpu_worker", "--device", "cpu", "--name", "w0", "--no-compile"]
    process = pool.start("w0", *command, "--cache-dir", str(tmp_path))
    wait_for(lambda: list(tmp_path.glob(f"gguf/{PREFIX}*")), "the conversion to begin", LOAD_S)
    process.terminate()
    assert process.wait(30) == 0
    assert list((tmp_path / "gguf").iterdir()) == []


def test_a_worker_that_is_told_to_go_while_its_step_hangs_goes(pool: Pool, tiny: Path) -> None:
    pool.broker()
    process = start_hanging(pool, "w0", tiny, "--drain-grace-s", "0.5")
    with pool.client() as client, client.stream(token_ids=HANGS_ON, max_tokens=3, seed=1):
        wait_for(lambda: (w := pool.worker("w0")) and w.in_hand == 1, "the request to be in hand")
        process.terminate()
        assert process.wait(15) == 0


def test_c55_many_threads_and_lengths_at_once_never_borrow_the_tokenizer_twice(
    pool: Pool, tiny: Path
) -> None:
    pool.broker()
    start_worker(pool, "w0", tiny, *tiny_flags())
    threads, each = 16, 200

    def ask(thread: int) -> int:
        with pool.client() as client:
            good = 0
            for n in range(each):
                text = "x" * (1 + (7 * n + thread) % 60)
                if n % 10:
                    good += client.detokenize(client.tokenize(text)) == text
                else:
                    good += client.generate(text, max_tokens=1, seed=n).usage.completion_tokens == 1
            return good

    with ThreadPoolExecutor(threads) as executor:
        assert list(executor.map(ask, range(threads))) == [each] * threads
