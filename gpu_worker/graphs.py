"""Decode steps captured once and replayed: one launch instead of hundreds, for a few batch sizes.

A step with fewer rows than a size is padded with rows that read and write the page that belongs to nobody.
Knows nothing of CUDA but what its `capture` does for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .batch import Batch

#: Rows of the captured steps, up to the worker's slots.
SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

#: Captures what a function does and returns how to do it again, and its answer, which is overwritten.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def cuda_capture() -> Capture:
    """Capture as CUDA graphs, which share one pool of memory since they never run at the same time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # libraries allocate their workspaces on first use, which a capture forbids
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            answer = step()
        return graph.replay, answer

    return capture


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: Batch
    replay: Callable[[], None]
    answer: Tensor  # float32 [size, vocab]


class DecodeGraphs:
    """Captured decode steps.

    Args:
        compute: the eager step.
        capture: how to capture.
        slots: most rows of a step.
        page_tokens: tokens in one page.
        context: most tokens of a row.
        scratch_page: the page that belongs to nobody.
        device: where the inputs live.
    """

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],
        capture: Capture,
        *,
        slots: int,
        page_tokens: int,
        context: int,
        scratch_page: int,
        device: torch.device,
    ) -> None:
        self._compute = compute
        self._capture = capture
        self._page_tokens = page_tokens
        self._context = context
        self._scratch_page = scratch_page
        self._device = device
        most = next((size for size in SIZES if size >= slots), SIZES[-1])
        self.sizes: Sequence[int] = [size for size in SIZES if size <= most]
        self._captured: dict[int, _Captured] = {}

    def capture_all(self) -> None:
        """Capture every size, the largest first, so that the others fit into its memory."""
        for size in reversed(self.sizes):
            inputs = self._blank(size)

            def step(inputs: Batch = inputs) -> Tensor:
                return self._compute(inputs)

            replay, answer = self._capture(step)
            self._captured[size] = _Captured(inputs, replay, answer)

    def fits(self, step: Batch) -> bool:
        """Whether `run` can do this step: every row decodes one token, and a size is large enough."""
        rows = len(step.query_lens)
        return bool(self._captured) and step.decodes and rows <= self.sizes[-1]

    def run(self, step: Batch) -> Tensor:
        """Replay the smallest size that holds the step → float32 [rows, vocab], valid until the next run."""
        rows = len(step.query_lens)
        captured = self._captured[next(size for size in self.sizes if size >= rows)]
        _fill(captured.inputs, step, rows, self._scratch_page, self._page_tokens)
        captured.replay()
        return captured.answer[:rows]

    def _blank(self, size: int) -> Batch:
        """Inputs of `size` rows, all of them padding, at places that stay."""

        def of(shape: tuple[int, ...], value: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self._device)

        width = -(-self._context // self._page_tokens)
        return Batch(
            token_ids=of((size,), 0, torch.long),
            positions=of((size,), 0, torch.long),
            slots=of((size,), self._scratch_page * self._page_tokens, torch.long),
            query_start=torch.arange(size + 1, dtype=torch.int32, device=self._device),
            context=of((size,), 1, torch.int32),
            page_table=of((size, width), self._scratch_page, torch.int32),
            wanted=torch.arange(size, device=self._device),
            wanted_count=size,
            query_lens=[1] * size,
            # Only a bound for whoever captures: what counts is the tensor.
            context_lens=[self._context] * size,
        )


def _fill(inputs: Batch, step: Batch, rows: int, scratch_page: int, page_tokens: int) -> None:
    """Copy the step into the captured inputs, and make padding of the rows behind it."""
    width = step.page_table.shape[1]
    inputs.token_ids[:rows].copy_(step.token_ids)
    inputs.positions[:rows].copy_(step.positions)
    inputs.slots[:rows].copy_(step.slots)
    inputs.context[:rows].copy_(step.context)
    inputs.page_table[:rows, :width].copy_(step.page_table)
    inputs.positions[rows:].zero_()
    inputs.slots[rows:].fill_(scratch_page * page_tokens)
    inputs.context[rows:].fill_(1)
    inputs.page_table[rows:, :1].fill_(scratch_page)
