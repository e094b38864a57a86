"""The runner against transformers' own generate."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.runner import Runner
from gpu_worker.support import NotPaged

from . import tiny_models
from .tiny_models import ARCHITECTURES, Loop, Row

NEW_TOKENS = 12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batched_with_joins_and_leaves_is_what_generate_says(architecture: str) -> None:
    model = tiny_models.build(architecture)
    prompts = tiny_models.prompts(6)
    expected = [tiny_models.generated(model, prompt, NEW_TOKENS) for prompt in prompts]
    loop = Loop(tiny_models.runner(model))

    waiting = [loop.join(prompt) for prompt in prompts]
    active, done = [], []
    for _ in range(200):
        if waiting:
            active.append(waiting.pop(0))
        loop.step(active, chunk=11)
        for sequence in [s for s in active if len(s.token_ids) >= len(expected[_index(s, prompts)])]:
            active.remove(sequence)
            loop.leave(sequence)
            done.append(sequence)
        if len(done) == len(prompts):
            break

    assert sorted(s.token_ids for s in done) == sorted(expected)
    assert len({tuple(s.token_ids[-NEW_TOKENS:]) for s in done}) > 1


def _index(sequence: tiny_models.Sequence, prompts: list[list[int]]) -> int:
    return next(i for i, p in enumerate(prompts) if sequence.token_ids[: len(p)] == p)


def test_logits_of_every_prompt_token_are_those_of_one_plain_forward() -> None:
    model = tiny_models.build("llama")
    prompt = tiny_models.prompts(1, most=30)[0]
    with torch.inference_mode():
        plain = model(torch.tensor([prompt])).logits[0]
    runner = tiny_models.runner(model)
    loop = Loop(runner)
    other, asked = loop.join([5, 6, 7]), loop.join(prompt)
    loop.step([other])
    asked.pages = [loop.free.pop() for _ in range(20)]
    first, second = Row(asked, len(prompt) - 4), Row(other, 1)

    sampled, prompts = runner.forward_with_prompts([second, first], [1])

    assert sampled.shape == (1, tiny_models.VOCAB)
    torch.testing.assert_close(prompts[1], plain[: len(prompt) - 4], rtol=1e-4, atol=1e-4)


def test_a_step_in_which_nobody_samples_returns_no_rows() -> None:
    loop = Loop(tiny_models.runner(tiny_models.build("llama")))
    logits = loop.step([loop.join([5, 6, 7, 8])], chunk=2)
    assert logits.shape == (0, tiny_models.VOCAB)


def test_warm_up_touches_no_page_of_the_engine() -> None:
    runner = tiny_models.runner(tiny_models.build("llama"))
    before = [pages[:-1].clone() for layer in runner._caches for pages in layer]
    runner.warm_up()
    after = [pages[:-1] for layer in runner._caches for pages in layer]
    assert all(map(torch.equal, before, after))


def test_a_model_whose_answers_would_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(query: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros_like(query)

    monkeypatch.setattr(Runner, "_choose_attention", lambda self: blind)
    with pytest.raises(NotPaged, match="off by"):
        tiny_models.runner(tiny_models.build("llama"))
