"""Rows become tensors: what lies where."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

from gpu_worker import batch
from gpu_worker.batch import Batch

from .tiny_models import Row, Sequence


def build(rows: list[Row], every_token: Collection[int] = ()) -> Batch:
    return batch.build(rows, page_tokens=4, device=torch.device("cpu"), every_token=every_token)


def test_rows_lie_one_behind_the_other() -> None:
    decoding = Sequence([5, 6, 7, 8, 9], computed=4, pages=[3, 1])
    prompt = Sequence([10, 11, 12, 13, 14, 15, 16], computed=2, pages=[8, 2])

    step = build([Row(decoding, 1), Row(prompt, 4)])

    assert step.token_ids.tolist() == [9, 12, 13, 14, 15]
    assert step.positions.tolist() == [4, 2, 3, 4, 5]
    assert step.slots.tolist() == [4, 34, 35, 8, 9]
    assert step.query_start.tolist() == [0, 1, 5]
    assert step.context.tolist() == [5, 6]
    assert step.page_table.tolist() == [[3, 1], [8, 2]]
    assert step.wanted[: step.wanted_count].tolist() == [0]
    assert not step.decodes


def test_the_last_piece_of_a_prompt_samples_and_the_others_do_not() -> None:
    prompt = Sequence(list(range(7)), computed=0, pages=[0, 1])
    assert build([Row(prompt, 4)]).wanted_count == 0
    prompt.computed = 4
    step = build([Row(prompt, 3)])
    assert step.wanted[: step.wanted_count].tolist() == [2]


def test_rows_that_only_decode_are_known_as_such() -> None:
    rows = [Row(Sequence([1, 2], 1, [number]), 1) for number in range(3)]
    assert build(rows).decodes


def test_a_row_may_want_logits_at_every_token() -> None:
    one, two = Sequence([1, 2, 3], 0, [0]), Sequence([4, 5, 6], 0, [1])
    step = build([Row(one, 3), Row(two, 2)], every_token={1})
    assert step.wanted.tolist() == [2, 3, 4]


def test_a_sequence_without_pages_for_its_tokens_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="9 tokens need 3 pages, there are 2"):
        build([Row(Sequence(list(range(9)), 0, [0, 1]), 9)])
