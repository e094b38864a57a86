"""Padding to captured sizes, with a capture that only calls the step again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu_worker.graphs import DecodeGraphs

from . import tiny_models
from .tiny_models import Loop, Row


def repeat(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Stands for a graph: the same function over the same tensors, into the same answer."""
    answer = step()
    return lambda: answer.copy_(step()), answer


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_a_padded_step_says_what_the_eager_step_says(rows: int) -> None:
    runner = tiny_models.runner(tiny_models.build("mistral"), slots=8)
    graphs = DecodeGraphs(
        lambda step: runner._run(step, None),
        repeat,
        slots=8,
        page_tokens=runner.page_tokens,
        context=64,
        scratch_page=runner.pages_total,
        device=torch.device("cpu"),
    )
    with torch.inference_mode():
        graphs.capture_all()
    loop = Loop(runner)
    sequences = [loop.join(prompt) for prompt in tiny_models.prompts(rows)]
    loop.step(sequences)
    for sequence in sequences:
        sequence.pages.append(loop.free.pop())
    step = runner._batch([Row(sequence, 1) for sequence in sequences])

    with torch.inference_mode():
        assert graphs.fits(step)
        replayed = graphs.run(step).clone()
        eager = runner._run(step, None)

    torch.testing.assert_close(replayed, eager)


def test_steps_with_prompts_or_too_many_rows_are_left_to_the_eager_path() -> None:
    runner = tiny_models.runner(tiny_models.build("llama"), slots=2)
    graphs = DecodeGraphs(
        lambda step: runner._run(step, None),
        repeat,
        slots=2,
        page_tokens=runner.page_tokens,
        context=16,
        scratch_page=runner.pages_total,
        device=torch.device("cpu"),
    )
    with torch.inference_mode():
        graphs.capture_all()
    assert list(graphs.sizes) == [1, 2]
    decoding = [tiny_models.Sequence([5, 6], 1, [number]) for number in range(3)]
    assert not graphs.fits(runner._batch([Row(one, 1) for one in decoding]))
    assert not graphs.fits(runner._batch([Row(tiny_models.Sequence([5, 6], 0, [0]), 2)]))


@pytest.mark.gpu
def test_cuda_graphs_say_what_the_eager_step_says() -> None:
    model = tiny_models.build("llama", dtype=torch.bfloat16, head_dim=64).to("cuda")
    runner = tiny_models.runner(model, page_tokens=256, compile=True, slots=4)
    runner.start_compile()
    if runner._graphs is None:
        pytest.skip("no varlen_attn with block tables on this card")
    loop = Loop(runner)
    sequences = [loop.join(prompt) for prompt in tiny_models.prompts(3)]
    loop.step(sequences)
    step = runner._batch([Row(sequence, 1) for sequence in sequences])
    with torch.inference_mode():
        torch.testing.assert_close(runner._graphs.run(step), runner._run(step, None), rtol=0.02, atol=0.02)
