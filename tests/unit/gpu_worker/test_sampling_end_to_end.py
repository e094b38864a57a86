"""What requests ask of their tokens, through the whole engine over a real (tiny, random) model."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from broker.protocol import Grammar

from .fakes import EOS, VOCAB, Bench, Heard, tokenizer
from .test_architectures import bench, llama, of
from .tiny_models import build, runner

PROMPT = "The quick brown fox"
NEW_TOKENS = 24

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "seed": 3, "min_p": 0.05},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "seed": 4, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0, "logit_bias": [(97, 100.0)]},
    {"temperature": 1.0, "seed": 5, "min_tokens": 20, "stop_token_ids": list(range(128))},
    {"temperature": 1.0, "seed": 6, "logprobs": 5},
    {"temperature": 1.0, "seed": 7, "grammar": Grammar("regex", "[a-z ]{10,20}\\.")},
]


def tokens(heard: Heard) -> list[int]:
    assert heard.error is None
    return [token for chunk in heard.chunks for token in chunk.token_ids]


def text(heard: Heard) -> str:
    assert heard.error is None
    return "".join(chunk.text for chunk in heard.chunks)


def wide_bench() -> Bench:
    made = runner(llama(), page_tokens=4, slots=len(KINDS), step_tokens=64)
    return Bench(made, sampler=None, model=of(llama()), slots=len(KINDS), step_tokens=64)


def test_c45_rows_that_all_differ_get_in_one_batch_what_each_gets_alone() -> None:
    together = wide_bench()
    asked = [
        together.submit(PROMPT, id=str(n), max_tokens=NEW_TOKENS, **kind) for n, kind in enumerate(KINDS)
    ]
    together.finish()
    for number, kind in enumerate(KINDS):
        alone = bench(llama()).ask(PROMPT, max_tokens=NEW_TOKENS, **kind)
        assert tokens(asked[number]) == tokens(alone), kind
        assert text(asked[number]) == text(alone), kind


@pytest.mark.parametrize("kind", [{"temperature": 0}, {"temperature": 1.0, "seed": 9}], ids=str)
@pytest.mark.parametrize(("first", "length"), [(3, 1), (5, 4), (0, 2), (12, 8)])
def test_c37_a_stop_string_cuts_the_text_where_it_first_is_complete(
    kind: dict[str, Any], first: int, length: int
) -> None:
    free = text(bench(llama()).ask(PROMPT, max_tokens=NEW_TOKENS, ignore_eos=True, **kind))
    stop = free[first : first + length]
    stopped = bench(llama()).ask(PROMPT, max_tokens=NEW_TOKENS, ignore_eos=True, stop=[stop], **kind)
    assert text(stopped) == free.partition(stop)[0]
    assert stopped.outcome is not None
    assert (stopped.outcome.finish_reason, stopped.outcome.stop_reason) == ("stop", stop)


def test_logprobs_are_those_of_one_plain_forward() -> None:
    heard = bench(llama()).ask(
        PROMPT, max_tokens=8, temperature=0.7, seed=3, top_k=5, logprobs=3, ignore_eos=True
    )
    prompt = tokenizer().encode(PROMPT)
    ids = [*prompt, *tokens(heard)]
    with torch.inference_mode():
        plain = build("llama", vocab_size=VOCAB)  # the same weights without our attention
        expected = plain(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    reports = [report for chunk in heard.chunks for report in chunk.logprobs or []]
    assert [report.token_id for report in reports] == tokens(heard)
    for position, report in enumerate(reports, start=len(prompt) - 1):
        assert report.logprob == pytest.approx(float(expected[position, report.token_id]), abs=1e-3)
        assert [rival.token_id for rival in report.top] == expected[position].topk(3).indices.tolist()


def test_a_grammar_is_kept_and_ended_by_a_random_model() -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    for seed in range(3):
        asked = {"max_tokens": 60, "temperature": 1.0, "seed": seed}
        word = bench(llama()).ask(PROMPT, grammar=Grammar("regex", "(yes|no)+!"), **asked)
        assert re.fullmatch("(yes|no)+!", text(word))
        # A random model likes white space between the parts, so it is asked not to.
        bias = [(token, -100.0) for token in b" \n\t\r"]
        value = bench(llama()).ask(
            PROMPT, grammar=Grammar("json_schema", json.dumps(schema)), logit_bias=bias, **asked
        )
        assert set(json.loads(text(value))) == {"ok"}
        assert value.outcome is not None and value.outcome.finish_reason == "stop"


def test_a_grammar_whose_tokens_are_banned_is_that_requests_error() -> None:
    both = wide_bench()
    banned: dict[str, Any] = {"min_tokens": 4, "stop_token_ids": [*b"xy"]}
    dead = both.submit(PROMPT, id="dead", grammar=Grammar("regex", "[xy]"), max_tokens=4, **banned)
    alive = both.submit(PROMPT, id="alive", max_tokens=4, ignore_eos=True)
    both.finish()
    assert dead.error is not None and "No token is allowed" in dead.error.message
    assert len(tokens(alive)) == 4


def test_nothing_ends_before_min_tokens() -> None:
    bias = [(EOS, 100.0)]
    heard = bench(llama()).ask(PROMPT, max_tokens=9, min_tokens=5, logit_bias=bias)
    assert tokens(heard)[:5].count(EOS) == 0 and tokens(heard)[5:] == [EOS]
