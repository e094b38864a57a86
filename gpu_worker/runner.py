"""Runs the model over the rows of a step. Knows nothing of requests, sampling or text."""

from __future__ import annotations

import inspect
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from broker.logs import Log

from . import batch, compiled, fused, graphs, kv_cache, linears, native, support
from .attention import Attend, PagedInput, cpu, gathered, plug_in, varlen
from .batch import Batch, RowLike
from .settings import WorkerSettings

#: Lengths of the texts that a new runner tries side by side.
_TRIAL_TOKENS: Final = (7, 5)


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
        self._settings = settings
        self._vocab: int = loaded.vocab
        self._context: int = loaded.context
        self._compiled: compiled.CompiledStep | None = None
        self._graphs: graphs.DecodeGraphs | None = None
        self._model = loaded.model
        self._device: torch.device = loaded.device
        self._dtype: torch.dtype = loaded.dtype
        # Before the first forward: at that, bitsandbytes rearranges its weights.
        self._kernels = self._load_kernels()
        self._layers = support.examine(loaded.model, loaded.context)
        plug_in(loaded.model)
        room = kv_cache.size(loaded, self._layers, settings, log)
        self.page_tokens = settings.page_tokens
        self.pages_total = room.pages
        self._caches = kv_cache.allocate(
            self._layers, room.pages, settings.page_tokens, dtype=loaded.dtype, device=loaded.device
        )
        self._attend = self._choose_attention()
        self._selects = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
        self._check_against_own_attention()

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
        self.forward([_Scratch([self.pages_total], [0])])

    def start_compile(self) -> None:
        """Use the compiled step: at once where it is on disk, else compiled in the background meanwhile."""
        if not self._settings.compile:
            return
        if self._attend is varlen.attend:
            self._capture()
        if self._attend is not cpu.attend:
            return
        try:
            job = self._job()
            library = native.cache_directory(self._settings.cache_dir) / f"step-{job.key()}.so"
            if library.exists():
                self._open(library)
                return
        except compiled.CompileFailed as problem:
            self._log.info("not compiled", reason=str(problem))
            return
        self._log.info("compiling", library=library.name)
        thread = threading.Thread(target=self._compile, args=(job, library), name="compile", daemon=True)
        thread.start()

    def _capture(self) -> None:
        """Capture decode steps as CUDA graphs; takes seconds, before the worker registers."""
        decode = graphs.DecodeGraphs(
            lambda step: self._run(step, None),
            graphs.cuda_capture(),
            slots=self._settings.slots,
            page_tokens=self.page_tokens,
            context=self._context,
            scratch_page=self.pages_total,
            device=self._device,
        )
        try:
            with torch.inference_mode():
                decode.capture_all()
        except RuntimeError as problem:
            self._log.warning("no graphs; serving eagerly", reason=str(problem).splitlines()[0])
            return
        self._graphs = decode
        self._log.info("decode graphs in use", sizes=list(decode.sizes))

    def _job(self) -> compiled.Job:
        return compiled.job_for(
            self._model,
            self._layers,
            dtype=self._dtype,
            page_tokens=self.page_tokens,
            selects=self._selects,
            kernels=native.cache_directory(self._settings.cache_dir),
        )

    def _compile(self, job: compiled.Job, library: Path) -> None:
        began = time.monotonic()
        try:
            compiled.finish(compiled.start(job, library))
            self._open(library, seconds=round(time.monotonic() - began, 1))
        except (compiled.CompileFailed, OSError, RuntimeError) as problem:
            self._log.warning("not compiled; serving eagerly", reason=str(problem))

    @torch.inference_mode()
    def _open(self, library: Path, **fields: object) -> None:
        """Take the library into use, once it has said the same as the eager step."""
        step = compiled.CompiledStep(library, self._model)
        off = self._disagreement(step)
        allowed = 0.1 if self._dtype.itemsize < 4 else 1e-3
        if not off < allowed:
            raise compiled.CompileFailed(f"the compiled step is off by {off:.2g} of the eager one")
        self._compiled = step
        self._log.info("compiled step in use", library=library.name, off=round(off, 5), **fields)

    def _load_kernels(self) -> bool:
        """On a CPU: have our own kernels, and let the linear layers use them. False: there are none."""
        if self._device.type != "cpu":
            return False
        try:
            native.load(native.cache_directory(self._settings.cache_dir))
        except (native.BuildFailed, OSError) as problem:
            self._log.warning("cpu kernels not built; torch's own operations serve", reason=str(problem))
            return False
        fused_layers = fused.use_kernels(self._model)
        linear_layers = linears.use_kernels(self._model)
        linears.gather(self._model)
        self._log.info("cpu kernels", linear_layers=linear_layers, fused_layers=fused_layers)
        return True

    def _choose_attention(self) -> Attend:
        """The fastest back end that this device, type and machine have; the choice is logged."""
        if self._kernels and self._dtype in cpu.DTYPES:
            self._log.info("attention", backend="cpu kernel")
            return cpu.attend
        reason = varlen.works(self._layers, self.page_tokens, self._dtype, self._device)
        if reason is None:
            self._log.info("attention", backend="varlen_attn")
            return varlen.attend
        self._log.info("attention", backend="gathered", not_varlen_because=reason)
        return gathered.attend

    def _batch(self, rows: Sequence[RowLike], every_token: Sequence[int] = ()) -> Batch:
        return batch.build(
            rows, page_tokens=self.page_tokens, device=self._device, every_token=frozenset(every_token)
        )

    @torch.inference_mode()
    def _check_against_own_attention(self) -> None:
        """Compare with the model's own attention: what `examine` didn't notice must show here.

        Raises:
            NotPaged: two texts side by side in the cache come out otherwise than one by one without it.
        """
        draw = torch.Generator().manual_seed(1)
        first, second = (-(-tokens // self.page_tokens) for tokens in _TRIAL_TOKENS)
        if first + second > self.pages_total:
            return
        off: list[float] = []
        for _ in range(3):
            texts = [torch.randint(self._vocab, (tokens,), generator=draw) for tokens in _TRIAL_TOKENS]
            pages = (range(first), range(first, first + second))
            rows = [_Scratch(list(own), text.tolist()) for own, text in zip(pages, texts, strict=True)]
            ours = self._run(self._batch(rows), None)
            plug_in(self._model, "eager")
            for number, text in enumerate(texts):
                own = (
                    self._model(input_ids=text[None].to(self._device), use_cache=False).logits[0, -1].float()
                )
                off.append(float((ours[number] - own).norm() / own.norm()))
            plug_in(self._model)
        if not statistics.median(off) < (0.25 if self._dtype.itemsize < 4 else 1e-3):
            raise support.NotPaged(f"its answers would be off by {statistics.median(off):.2g} of its own")

    def _disagreement(self, step: compiled.CompiledStep) -> float:
        """How far the compiled step's logits are from the eager ones', relative, over a few random texts.

        The median: in bfloat16 a text can be so odd that eager and exact logits have little in common.
        """
        draw = torch.Generator().manual_seed(0)
        tokens = min(8, self.page_tokens)
        off = []
        for _ in range(5):
            text = torch.randint(self._vocab, (tokens,), generator=draw).tolist()
            trial = self._batch([_Scratch([self.pages_total], text)])
            ours, theirs = self._run(trial, step), self._run(trial, None)
            off.append(float((ours - theirs).norm() / theirs.norm()))
        return statistics.median(off)

    def _logits(self, step: Batch) -> Tensor:
        if self._graphs is not None and self._graphs.fits(step):
            return self._graphs.run(step)
        return self._run(step, self._compiled)[: step.wanted_count]

    def _run(self, step: Batch, library: compiled.CompiledStep | None) -> Tensor:
        if library is not None:
            inputs = (step.token_ids, step.positions, step.slots, step.query_start, step.context)
            return library((*inputs, step.page_table, step.wanted), self._caches)
        paged = PagedInput(
            slots=step.slots,
            query_start=step.query_start,
            context=step.context,
            page_table=step.page_table,
            query_lens=step.query_lens,
            context_lens=step.context_lens,
            most_query=max(step.query_lens),
            most_context=max(step.context_lens),
            caches=self._caches,
            layers=self._layers,
            attend=self._attend,
        )
        return compiled.forward(
            self._model, step.token_ids, step.positions, step.wanted, paged, selects=self._selects
        )


class _Scratch:
    """A row and its own sequence, for trials."""

    computed = 0

    def __init__(self, pages: list[int], token_ids: list[int]) -> None:
        self.tokens = len(token_ids)
        self.token_ids = token_ids
        self.pages = pages

    @property
    def sequence(self) -> _Scratch:
        return self
