"""Sequences for tests that need neither a tokenizer nor a model."""

from __future__ import annotations

from typing import Any

from gpu_worker.sequence import SamplingParams, Sequence


def sequence(prompt: int | list[int] = 5, max_tokens: int = 4, *, id: str = "a", **params: Any) -> Sequence:
    """A sequence with a prompt of these tokens, or of so many; its text is never asked for."""
    token_ids = list(range(10, 10 + prompt)) if isinstance(prompt, int) else list(prompt)
    chosen = SamplingParams(max_tokens=max_tokens, **params)
    return Sequence(id, f"request-{id}", token_ids, len(token_ids), chosen, seed=1, text=None)  # type: ignore[arg-type]
