"""The derived quantities of a sequence."""

from __future__ import annotations

from typing import Any

from gpu_worker.sequence import SamplingParams

from .sequences import sequence


def test_position_is_the_index_of_the_token_to_be_drawn() -> None:
    seq = sequence(prompt=5)
    assert seq.position == 5
    seq.token_ids.append(9)
    assert (seq.position, seq.output_tokens, seq.output_ids) == (6, 1, [9])


def test_remaining_and_most_tokens_count_from_the_prompt() -> None:
    seq = sequence(prompt=5, max_tokens=4)
    seq.token_ids += [1, 2]
    assert (seq.remaining_tokens, seq.most_tokens) == (2, 9)


def test_uncomputed_is_what_the_model_has_not_seen() -> None:
    seq = sequence(prompt=5)
    seq.computed = 3
    assert seq.uncomputed == 2


def test_ending_ids_hold_eos_unless_it_is_ignored() -> None:
    ids: dict[str, Any] = {"stop_token_ids": frozenset({4}), "eos_ids": frozenset({2, 7})}
    assert SamplingParams(max_tokens=1, **ids).ending_ids == {2, 4, 7}
    assert SamplingParams(max_tokens=1, ignore_eos=True, **ids).ending_ids == {4}


def test_prompt_logits_are_wanted_until_the_first_chunk_is_out() -> None:
    seq = sequence(prompt_logprobs=0)
    assert seq.wants_prompt_logits
    seq.opened = True
    assert not seq.wants_prompt_logits
    assert not sequence().wants_prompt_logits
