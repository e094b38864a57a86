"""Runs the model over the rows of a step. Knows nothing of requests, sampling or text."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from broker.logs import Log

from . import batch, kv_cache, native, support
from .attention import Attend, PagedInput, cpu, gathered, plug_in
from .batch import Batch, RowLike
from .settings import WorkerSettings


class Runner:
    """The model, its paged cache, and the forward pass that joins them.

    Attributes:
        pages_total: pages that the engine may give out, numbered from 0.
        page_tokens: tokens in one page.

    Raises:
        support.NotPaged: the model wants something that the paged path doesn't do.
        MemoryError: there is no room for a single page.
    """

    def __init__(self, loaded: Any, settings: WorkerSettings, log: Log) -> None:
        self._log = log
        self._model = loaded.model
        self._device: torch.device = loaded.device
        self._dtype: torch.dtype = loaded.dtype
        self._layers = support.examine(loaded.model, loaded.context)
        plug_in(loaded.model)
        room = kv_cache.size(loaded, self._layers, settings, log)
        self.page_tokens = settings.page_tokens
        self.pages_total = room.pages
        self._caches = kv_cache.allocate(
            self._layers, room.pages, settings.page_tokens, dtype=loaded.dtype, device=loaded.device
        )
        self._attend = self._choose_attention(settings)
        self._selects = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters

    @torch.inference_mode()
    def forward(self, rows: Sequence[RowLike]) -> Tensor:
        """Compute the rows and write their keys and values.

        Returns:
            float32 [S, vocab]: the logits of the S rows that reach the end of their sequence, in order.
        """
        return self._logits(self._batch(rows))

    @torch.inference_mode()
    def forward_with_prompts(
        self, rows: Sequence[RowLike], every_token: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `forward`, for steps in which some rows want logits at each of their tokens.

        Args:
            rows: what to compute.
            every_token: numbers of the rows that want them.

        Returns:
            what `forward` returns, and per row of `every_token` its logits, float32 [tokens, vocab].
        """
        flat = self._logits(self._batch(rows, every_token))
        sampling: list[Tensor] = []
        prompts: dict[int, Tensor] = {}
        at = 0
        for number, row in enumerate(rows):
            samples = row.sequence.computed + row.tokens == len(row.sequence.token_ids)
            if number in every_token:
                prompts[number] = flat[at : at + row.tokens]
                at += row.tokens
            elif samples:
                at += 1
            if samples:
                sampling.append(flat[at - 1])
        return torch.stack(sampling) if sampling else flat[:0], prompts

    def warm_up(self) -> None:
        """Send one token through the model; nothing of it stays."""
        scratch = _Scratch(self.pages_total)
        self.forward([scratch])

    def start_compile(self) -> None:
        """Begin to compile in the background."""

    def _choose_attention(self, settings: WorkerSettings) -> Attend:
        """The fastest back end that this device, type and machine have; the choice is logged."""
        if self._device.type == "cpu":
            try:
                native.load(native.cache_directory(settings.cache_dir))
            except native.BuildFailed as problem:
                self._log.warning("cpu kernels not built; torch's own operations serve", reason=str(problem))
                return gathered.attend
            layers = cpu.use_linear_kernel(self._model)
            if self._dtype in cpu.DTYPES:
                self._log.info("attention", backend="cpu kernel", own_linear_layers=layers)
                return cpu.attend
        self._log.info("attention", backend="gathered")
        return gathered.attend

    def _batch(self, rows: Sequence[RowLike], every_token: Sequence[int] = ()) -> Batch:
        return batch.build(
            rows, page_tokens=self.page_tokens, device=self._device, every_token=frozenset(every_token)
        )

    def _logits(self, step: Batch) -> Tensor:
        paged = PagedInput(
            slots=step.slots,
            query_start=step.query_start,
            context=step.context,
            page_table=step.page_table,
            query_lens=step.query_lens,
            context_lens=step.context_lens,
            caches=self._caches,
            layers=self._layers,
            attend=self._attend,
        )
        keep = {"logits_to_keep": step.wanted} if self._selects else {}
        output = self._model(
            input_ids=step.token_ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            paged=paged,
            **keep,
        )
        logits = output.logits[0]
        return (logits if self._selects else logits[step.wanted]).float()


class _Scratch:
    """One token on the page that belongs to nobody."""

    tokens = 1
    computed = 0

    def __init__(self, page: int) -> None:
        self.token_ids = [0]
        self.pages = [page]

    @property
    def sequence(self) -> _Scratch:
        return self
