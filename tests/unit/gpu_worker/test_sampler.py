"""Each row is drawn as a slow reading of its parameters says, whoever its neighbours are."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from broker.errors import InternalError
from gpu_worker.draws import uniforms
from gpu_worker.sampler import Sampled, Sampler
from gpu_worker.sequence import SamplingParams

VOCAB = 600


def sequence(
    seed: int = 0,
    output: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (1, 2),
    grammar: Any = None,
    **given: Any,
) -> Any:
    params = SamplingParams(max_tokens=100, **given)
    tokens = [*prompt, *output]
    return SimpleNamespace(
        params=params, seed=seed, token_ids=tokens, output_ids=list(output), output_tokens=len(output),
        position=len(tokens), prompt_tokens=len(prompt), grammar=grammar, adjustments=None,
    )  # fmt: skip


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, *sequences: Any) -> list[Sampled]:
    return Sampler(torch.device("cpu"), VOCAB).sample(logits.clone(), list(sequences))


def adjusted(logits: torch.Tensor, seq: Any) -> list[float]:
    """Penalties, bias and bans, token by token in plain Python."""
    p = seq.params
    row: list[float] = logits.tolist()
    for token in set(seq.token_ids):
        row[token] *= 1 / p.repetition_penalty if row[token] > 0 else p.repetition_penalty
    for token in set(seq.output_ids):
        row[token] -= p.presence_penalty + p.frequency_penalty * seq.output_ids.count(token)
    for token, bias in p.logit_bias:
        row[token] += bias
    banned = p.ending_ids if seq.output_tokens < p.min_tokens else ()
    return [-math.inf if token in banned else x for token, x in enumerate(row)]


def lowest(scaled: list[float], p: SamplingParams) -> float:
    """The least scaled logit that top_k, top_p and min_p let in."""
    floor = math.log(p.min_p) if p.min_p else -math.inf
    ordered = sorted(scaled, reverse=True)
    if p.top_k:
        ordered = ordered[: p.top_k]
        floor = max(floor, ordered[-1])
    sums = list(itertools.accumulate(map(math.exp, ordered)))
    if p.top_p < 1:
        floor = max(floor, next(x for x, s in zip(ordered, sums, strict=True) if s >= p.top_p * sums[-1]))
    return floor


def slowly(logits: torch.Tensor, seq: Any) -> int:
    """The token that one row's parameters lead to."""
    row, p = adjusted(logits, seq), seq.params
    if p.temperature < 1e-5:
        return row.index(max(row))
    peak = max(row)
    scaled = [(x - peak) / p.temperature for x in row]
    floor = lowest(scaled, p)
    sums = list(itertools.accumulate(math.exp(x) if x >= floor else 0.0 for x in scaled))
    target = uniforms([seq.seed], [seq.position])[0] * sums[-1]
    return next(token for token, s in enumerate(sums) if s > target)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 40, "temperature": 0.7},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    {"repetition_penalty": 1.4, "output": (5, 5, 9)},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "output": (5, 5, 9, 11)},
    {"logit_bias": ((7, 100.0),)},
    {"logit_bias": ((7, 3.0), (7, 3.0))},
    {"min_tokens": 3, "stop_token_ids": frozenset(range(300)), "output": (4,)},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_is_drawn_as_its_parameters_say(kind: dict[str, Any]) -> None:
    for seed in range(25):
        logits = logits_of(1, seed)
        seq = sequence(seed=seed, **kind)
        assert sample(logits, seq)[0].token_id == slowly(logits[0], seq), f"seed {seed}"


def test_penalties_count_tokens_as_they_come() -> None:
    kind: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}
    growing = sequence(seed=4, prompt=(1, 2, 2), **kind)
    for step in range(300):
        logits = logits_of(1, step)
        drawn = sample(logits, growing)[0].token_id
        fresh = sequence(seed=4, prompt=(1, 2, 2), output=tuple(growing.output_ids), **kind)
        assert drawn == sample(logits, fresh)[0].token_id == slowly(logits[0], fresh), f"step {step}"
        growing.token_ids.append(drawn)
        growing.output_ids.append(drawn)
        growing.output_tokens, growing.position = step + 1, growing.position + 1


def test_a_grammar_that_fails_takes_its_own_row_only() -> None:
    def fails() -> torch.Tensor:
        raise InternalError("The grammar can't go on.")

    broken = sequence(grammar=SimpleNamespace(mask=fails), logprobs=2)
    results = sample(logits_of(2), broken, sequence(logprobs=1))
    assert results[0].error == "The grammar can't go on." and results[1].error is None
    assert results[1].logprob is not None and len(results[1].top) == 1


def test_c45_a_row_does_not_depend_on_its_neighbours() -> None:
    sequences = [sequence(seed=i, **KINDS[i % len(KINDS)]) for i in range(64)]
    logits = logits_of(64)
    together = [s.token_id for s in sample(logits, *sequences)]
    alone = [sample(logits[i : i + 1], seq)[0].token_id for i, seq in enumerate(sequences)]
    assert together == alone


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9])
def test_c12_no_temperature_is_greedy(temperature: float) -> None:
    logits = logits_of(1)
    drawn = [sample(logits, sequence(seed=s, temperature=temperature, top_p=0.5))[0] for s in range(5)]
    assert {d.token_id for d in drawn} == {int(logits.argmax())}


def test_draws_follow_the_distribution() -> None:
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, :3] = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    counts = [0, 0, 0]
    for seed in range(3000):
        counts[sample(logits, sequence(seed=seed))[0].token_id] += 1
    assert [abs(c / 3000 - want) < 0.04 for c, want in zip(counts, (0.5, 0.3, 0.2), strict=True)] == [
        True
    ] * 3


def test_ties_at_the_limit_all_get_in_so_that_no_order_decides() -> None:
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, [5, 6, 7, 8]] = 1.0
    drawn = {sample(logits, sequence(seed=s, top_k=2))[0].token_id for s in range(200)}
    assert drawn == {5, 6, 7, 8}


def test_a_row_that_is_not_a_number_fails_alone() -> None:
    logits = logits_of(4)
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    results = sample(logits, sequence(temperature=0.0), sequence(), sequence(), sequence())
    assert [r.error is not None for r in results] == [False, True, True, False]
    assert results[3].token_id == slowly(logits[3], sequence())


def test_a_row_in_which_nothing_is_allowed_fails_alone() -> None:
    mask = torch.zeros((VOCAB + 31) // 32, dtype=torch.int32)
    banned = sequence(grammar=SimpleNamespace(mask=lambda: mask))
    results = sample(logits_of(2), banned, sequence())
    assert results[0].error is not None and results[1].error is None


def test_a_mask_lets_only_its_tokens_through() -> None:
    mask = torch.zeros((VOCAB + 31) // 32, dtype=torch.int32)
    mask[0] = -(2**31)  # token 31
    mask[3] = 1  # token 96
    limited = [sequence(seed=s, grammar=SimpleNamespace(mask=lambda: mask)) for s in range(50)]
    assert {r.token_id for r in sample(logits_of(50), *limited)} <= {31, 96}


def test_logprobs_are_the_models_own_whatever_the_parameters() -> None:
    logits = logits_of(1)
    seq = sequence(logprobs=3, temperature=0.2, top_k=1, logit_bias=((9, 100.0),))
    (drawn,) = sample(logits, seq)
    own = logits[0].log_softmax(-1)
    assert drawn.token_id == 9
    assert drawn.logprob == pytest.approx(float(own[9]))
    best = own.topk(3)
    assert [token for token, _ in drawn.top] == best.indices.tolist()
    assert [value for _, value in drawn.top] == pytest.approx(best.values.tolist())


def test_logits_beyond_the_vocabulary_are_never_drawn() -> None:
    logits = torch.nn.functional.pad(logits_of(2), (0, 40), value=100.0)
    assert all(r.token_id < VOCAB for r in sample(logits, sequence(temperature=0.0), sequence()))
