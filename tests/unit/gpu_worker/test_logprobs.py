"""Token texts and bytes, and reports of prompt tokens."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gpu_worker.logprobs import TokenTexts, of_prompt, report

from .fakes import END_OF_TURN, EOS, VOCAB, tokenizer


def sentencepiece() -> PreTrainedTokenizerFast:
    vocab = {"<unk>": 0, "\u2581hello": 1, "<0xC3>": 2, "<0xA9>": 3, "é": 4}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.mark.parametrize("byte", [0, 10, 32, 65, 127, 0xA9, 0xC3, 0xFF])
def test_a_byte_level_token_has_its_byte(byte: int) -> None:
    assert TokenTexts(tokenizer())[byte] == (bytes([byte]).decode("utf-8", "replace"), [byte])


def test_special_tokens_are_spelled_as_they_are() -> None:
    texts = TokenTexts(tokenizer())
    assert texts[EOS] == ("<eos>", [*b"<eos>"])
    assert texts[END_OF_TURN] == ("<end>", [*b"<end>"])


def test_an_id_without_a_token_has_no_text() -> None:
    assert TokenTexts(tokenizer())[VOCAB + 5] == ("", [])


@pytest.mark.parametrize(
    ("token_id", "text", "spelled"),
    [(1, " hello", b" hello"), (2, "\ufffd", b"\xc3"), (3, "\ufffd", b"\xa9"), (4, "é", "é".encode())],
)
def test_c36_a_sentencepiece_token_keeps_its_space_and_its_byte(
    token_id: int, text: str, spelled: bytes
) -> None:
    assert TokenTexts(sentencepiece())[token_id] == (text, [*spelled])


def test_a_report_names_the_rivals_in_order() -> None:
    said = report(TokenTexts(tokenizer()), 97, -0.5, [(97, -0.5), (98, -1.5)])
    assert (said.token, said.logprob) == ("a", -0.5)
    assert [(rival.token, rival.logprob) for rival in said.top] == [("a", -0.5), ("b", -1.5)]


def test_prompt_reports_are_the_log_softmax_at_the_token_that_came() -> None:
    logits = torch.randn(4, VOCAB)
    expected = logits.log_softmax(-1)
    reports = of_prompt(TokenTexts(tokenizer()), logits, [5, 6, 7], 2)
    assert [r.token_id for r in reports] == [5, 6, 7]
    for row, one in enumerate(reports):
        assert one.logprob == pytest.approx(expected[row, one.token_id].item())
        assert [rival.token_id for rival in one.top] == expected[row].topk(2).indices.tolist()


def test_no_rivals_are_named_if_none_are_wanted() -> None:
    (one,) = of_prompt(TokenTexts(tokenizer()), torch.zeros(1, VOCAB), [5], 0)
    assert one.top == []


def test_the_last_prompt_token_has_nothing_to_predict() -> None:
    assert of_prompt(TokenTexts(tokenizer()), torch.zeros(1, VOCAB), [], 3) == []
