"""Requests → sequences, answers or errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from broker import protocol
from broker.errors import ContextTooLong, InvalidRequest, LoadOnceError
from broker.protocol import ChatMessage, Chunk, Grammar, Params, Request
from gpu_worker.exchange import Run
from gpu_worker.intake import Answer, Intake, describe_defaults
from gpu_worker.loading import SamplingDefaults
from gpu_worker.sequence import Sequence

from .fakes import CONTEXT, END_OF_TURN, EOS, VOCAB, loaded


@pytest.fixture(scope="module")
def intake() -> Intake:
    return Intake(loaded(), CONTEXT)


def accept(
    intake: Intake, request: Request | bytes, chunks: tuple[Chunk, ...] = (), id: str = "client-1"
) -> Sequence | Answer:
    frame = request if isinstance(request, bytes) else protocol.encode(request)
    return intake.accept(Run("1", id, frame, tuple(protocol.encode(chunk) for chunk in chunks)))


def sequence(intake: Intake, prompt: str = "hi", chunks: tuple[Chunk, ...] = (), **params: Any) -> Sequence:
    found = accept(intake, Request(prompt=prompt, params=Params(**params)), chunks)
    assert isinstance(found, Sequence)
    return found


def refusal(intake: Intake, request: Request | bytes, chunks: tuple[Chunk, ...] = ()) -> LoadOnceError:
    with pytest.raises(InvalidRequest) as caught:
        accept(intake, request, chunks)
    assert caught.value.param and caught.value.param in caught.value.message
    return caught.value


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_becomes_its_tokens(intake: Intake) -> None:
    seq = sequence(intake, "hi")
    assert (seq.token_ids, seq.prompt_tokens, seq.computed, seq.output_tokens) == ([*b"hi"], 2, 0, 0)
    assert (seq.id, seq.request_id) == ("1", "client-1")


def test_messages_go_through_the_models_template(intake: Intake) -> None:
    seq = accept(intake, Request(messages=[ChatMessage("user", "hi")]))
    assert isinstance(seq, Sequence)
    assert bytes(seq.token_ids) == b"user: hi\nassistant: "


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(), "prompt"),
        (Request(prompt="a", token_ids=[1]), "token_ids"),
        (Request(prompt="a", messages=[ChatMessage("user", "b")]), "messages"),
        (Request(prompt=""), "prompt"),
        (Request(token_ids=[]), "token_ids"),
        (Request(messages=[]), "messages"),
        (Request(prompt="a", tools=[{"type": "function"}]), "tools"),
    ],
)
def test_exactly_one_prompt_that_is_not_empty_is_needed(
    intake: Intake, request_: Request, field: str
) -> None:
    assert refusal(intake, request_).param == field


@pytest.mark.parametrize("wrong", [VOCAB, -1, 10_000_000, 2**40])
def test_c46_token_ids_outside_the_vocabulary_are_refused(intake: Intake, wrong: int) -> None:
    problem = refusal(intake, Request(token_ids=[0, 5, wrong]))
    assert problem.param == "token_ids" and str(wrong) in problem.message and "257" in problem.message
    refused = refusal(intake, Request(prompt="a", params=Params(stop_token_ids=[wrong])))
    assert refused.param == "stop_token_ids"
    refused = refusal(intake, Request(prompt="a", params=Params(logit_bias=[(wrong, 5.0)])))
    assert refused.param == "logit_bias"


@pytest.mark.parametrize("wrong", [[1.5], ["1"], [[1]], [None], [2**70]])
def test_c46_token_ids_that_are_no_integers_are_refused(intake: Intake, wrong: list[Any]) -> None:
    if wrong == [2**70]:
        frame = b"\x81\xa9token_ids\x91\xcf" + b"\xff" * 8  # the largest that msgpack can say
    else:
        frame = protocol.encode({"token_ids": wrong})
    with pytest.raises(InvalidRequest, match="token_ids"):
        accept(intake, frame)


def test_c46_the_last_token_of_the_vocabulary_is_allowed(intake: Intake) -> None:
    seq = accept(intake, Request(token_ids=[0, VOCAB - 1]))
    assert isinstance(seq, Sequence)


# ── context ──────────────────────────────────────────────────────────────────────────────────────


def test_c7_the_boundary_is_allowed_and_one_more_says_limit_prompt_and_request(intake: Intake) -> None:
    seq = sequence(intake, "12345678", max_tokens=CONTEXT - 8)
    assert seq.most_tokens == CONTEXT
    with pytest.raises(ContextTooLong) as caught:
        sequence(intake, "12345678", max_tokens=CONTEXT - 7)
    assert caught.value.param == "max_tokens"
    for number in (CONTEXT, 8, CONTEXT - 7):
        assert str(number) in caught.value.message


def test_c7_a_prompt_that_fills_the_context_leaves_no_room(intake: Intake) -> None:
    for size in (CONTEXT, CONTEXT + 1):
        with pytest.raises(ContextTooLong) as caught:
            sequence(intake, "x" * size)
        assert caught.value.param == "prompt" and str(size) in caught.value.message
    assert sequence(intake, "x" * (CONTEXT - 1)).remaining_tokens == 1


def test_no_max_tokens_means_up_to_the_contexts_end(intake: Intake) -> None:
    assert sequence(intake, "hi").params.max_tokens == CONTEXT - 2


@pytest.mark.parametrize(
    "request_",
    [Request(prompt="x" * 3_000_000), Request(messages=[ChatMessage("user", "x" * 3_000_000)])],
    ids=["prompt", "messages"],
)
def test_a_giant_prompt_is_refused_before_all_of_it_is_tokenized(
    intake: Intake, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake._prompts, "encode", lambda request: pytest.fail("it was tokenized"))
    with pytest.raises(ContextTooLong, match="more than 2048 tokens, the context is 128"):
        accept(intake, request_)


def test_a_cache_smaller_than_the_context_is_the_limit() -> None:
    with pytest.raises(ContextTooLong, match="context is 32"):
        sequence(Intake(loaded(), 32), "x" * 10, max_tokens=23)


# ── parameters ───────────────────────────────────────────────────────────────────────────────────


def test_min_tokens_above_max_tokens_is_refused(intake: Intake) -> None:
    problem = refusal(intake, Request(prompt="a", params=Params(min_tokens=5, max_tokens=4)))
    assert problem.param == "min_tokens"


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_parameter_that_is_no_number_is_refused(intake: Intake, field: str, value: float) -> None:
    frame = protocol.encode({"prompt": "a", "params": {field: value}})
    assert refusal(intake, frame).param == field


def test_a_bias_that_is_no_number_is_refused(intake: Intake) -> None:
    frame = protocol.encode({"prompt": "a", "params": {"logit_bias": [[5, float("nan")]]}})
    with pytest.raises(InvalidRequest, match="logit_bias"):
        accept(intake, frame)


def test_c49_a_repetition_penalty_of_zero_is_refused(intake: Intake) -> None:
    frame = protocol.encode({"prompt": "a", "params": {"repetition_penalty": 0}})
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        accept(intake, frame)


def test_a_report_of_the_prompt_that_no_frame_can_carry_is_refused() -> None:
    intake = Intake(loaded(context=2**17), 2**17)
    long = Request(token_ids=[5] * 50_000, params=Params(max_tokens=0, prompt_logprobs=20))
    assert refusal(intake, long).param == "prompt_logprobs"
    few = Request(token_ids=[5] * 50_000, params=Params(max_tokens=0, prompt_logprobs=1))
    assert isinstance(accept(intake, few), Sequence)


def test_an_unknown_parameter_is_refused(intake: Intake) -> None:
    frame = protocol.encode({"prompt": "a", "params": {"max_new_tokens": 5}})
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        accept(intake, frame)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", b"\xdd\x7f\xff\xff\xff", b"\x91" * 5000])
def test_c75_bytes_that_are_no_request_are_refused(intake: Intake, frame: bytes) -> None:
    with pytest.raises(InvalidRequest):
        accept(intake, frame)


def test_a_grammar_that_does_not_compile_is_the_callers_error(intake: Intake) -> None:
    params = Params(grammar=Grammar("regex", "(unclosed"))
    with pytest.raises(InvalidRequest):
        accept(intake, Request(prompt="a", params=params))


def test_c41_a_request_that_says_nothing_gets_the_models_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05)
    intake = Intake(loaded(defaults=defaults), CONTEXT)
    params = sequence(intake).params
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.6, 20, 1.05)
    assert (params.top_p, params.min_p) == (1.0, 0.0)


@pytest.mark.parametrize("no_limit", [0, -1])
def test_c41_a_value_in_the_request_wins_even_if_it_is_a_default(no_limit: int) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05)
    intake = Intake(loaded(defaults=defaults), CONTEXT)
    params = sequence(intake, temperature=1.0, top_k=no_limit, repetition_penalty=1.0).params
    assert (params.temperature, params.top_k, params.repetition_penalty) == (1.0, 0, 1.0)


def test_c41_the_rule_is_worded_with_the_models_values() -> None:
    text = describe_defaults(SamplingDefaults(temperature=0.6))
    assert "request always wins" in text
    assert "temperature 0.6" in text and "top_p 1.0" in text and "top_k 0" in text


def test_c39_eos_ids_of_both_sources_end_a_request() -> None:
    intake = Intake(loaded(eos_ids=frozenset({EOS, END_OF_TURN})), CONTEXT)
    assert sequence(intake).params.ending_ids == {EOS, END_OF_TURN}


def test_an_eos_id_that_the_model_has_no_logit_for_is_left_out() -> None:
    intake = Intake(loaded(eos_ids=frozenset({EOS, VOCAB})), CONTEXT)
    assert sequence(intake).params.ending_ids == {EOS}


def test_a_request_without_a_seed_gets_the_same_one_everywhere(intake: Intake) -> None:
    other = Intake(loaded(), CONTEXT)
    request = Request(prompt="a")
    first, again = accept(intake, request, id="x"), accept(other, request, id="x")
    different = accept(intake, request, id="y")
    assert isinstance(first, Sequence) and isinstance(again, Sequence) and isinstance(different, Sequence)
    assert first.seed == again.seed != different.seed
    assert sequence(intake, seed=-5).seed == -5


# ── max_tokens 0 ─────────────────────────────────────────────────────────────────────────────────


def test_c9_echo_of_a_prompt_with_max_tokens_0_needs_no_model(intake: Intake) -> None:
    answer = accept(intake, Request(prompt="hi", params=Params(max_tokens=0, echo=True)))
    assert isinstance(answer, Answer) and answer.chunk is not None
    assert (answer.chunk.prompt_text, answer.chunk.prompt_token_ids) == ("hi", [*b"hi"])
    assert answer.chunk.token_ids == [] and answer.chunk.text == ""
    assert answer.outcome.finish_reason == "length"
    assert answer.outcome.usage == protocol.Usage(2, 0)


def test_c9_max_tokens_0_that_asks_for_nothing_is_refused(intake: Intake) -> None:
    assert refusal(intake, Request(prompt="hi", params=Params(max_tokens=0))).param == "max_tokens"


def test_c9_prompt_logprobs_with_max_tokens_0_run_the_model(intake: Intake) -> None:
    assert sequence(intake, max_tokens=0, prompt_logprobs=1).wants_prompt_logits


# ── continuation ─────────────────────────────────────────────────────────────────────────────────


def test_delivered_chunks_are_appended_and_their_text_is_not_said_again(intake: Intake) -> None:
    chunks = (Chunk(token_ids=[*b"ab"], text="ab"), Chunk(start=2, token_ids=[*b"c"], text=""))
    seq = sequence(intake, "hi", chunks, echo=True)
    assert bytes(seq.token_ids) == b"hiabc"
    assert (seq.position, seq.output_tokens, seq.unsent, seq.opened) == (5, 3, "c", True)


@pytest.mark.parametrize(
    ("params", "chunk", "reason", "stop", "rest"),
    [
        ({"max_tokens": 2}, Chunk(token_ids=[*b"ab"], text="ab"), "length", None, None),
        ({}, Chunk(token_ids=[*b"a", EOS], text="a"), "stop", None, None),
        ({"stop_token_ids": [98]}, Chunk(token_ids=[*b"ab"], text=""), "stop", 98, "a"),
        ({"stop": ["bc"]}, Chunk(token_ids=[*b"abc"], text=""), "stop", "bc", "a"),
    ],
)
def test_chunks_that_end_the_request_are_answered_at_once(
    intake: Intake, params: dict[str, Any], chunk: Chunk, reason: str, stop: object, rest: str | None
) -> None:
    answer = accept(intake, Request(prompt="hi", params=Params(**params)), (chunk,))
    assert isinstance(answer, Answer)
    assert (answer.outcome.finish_reason, answer.outcome.stop_reason) == (reason, stop)
    assert answer.outcome.usage == protocol.Usage(2, len(chunk.token_ids))
    assert (answer.chunk and answer.chunk.text) == rest
    if answer.chunk:
        assert (answer.chunk.start, answer.chunk.token_ids) == (len(chunk.token_ids), [])


def test_an_echo_that_was_delivered_is_not_sent_again(intake: Intake) -> None:
    chunk = Chunk(prompt_text="hi", prompt_token_ids=[*b"hi"])
    answer = accept(intake, Request(prompt="hi", params=Params(max_tokens=0, echo=True)), (chunk,))
    assert isinstance(answer, Answer) and answer.chunk is None


@pytest.mark.parametrize(
    "chunks",
    [
        (Chunk(token_ids=[VOCAB], text=""),),
        (Chunk(token_ids=[*b"ab"], text="xy"),),
        (Chunk(token_ids=[*b"ab"], text="abc"),),
        (Chunk(token_ids=[*b"ab"]), Chunk(start=5, token_ids=[*b"c"])),
        (Chunk(start=2, token_ids=[*b"ab"]),),
        (Chunk(token_ids=[EOS, *b"ab"]),),
        (Chunk(token_ids=[*b"abcdef"]),),
    ],
)
def test_chunks_that_this_model_cannot_have_made_are_refused(
    intake: Intake, chunks: tuple[Chunk, ...]
) -> None:
    request = Request(prompt="hi", params=Params(max_tokens=5))
    assert refusal(intake, request, chunks).param == "chunks"


def test_chunks_that_are_no_chunks_are_refused(intake: Intake) -> None:
    with pytest.raises(InvalidRequest, match="chunks"):
        intake.accept(Run("1", "x", protocol.encode(Request(prompt="a")), (b"\xc1",)))


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def test_tokenize_answers_with_the_tokens(intake: Intake) -> None:
    answer = accept(intake, Request(prompt="hi", task="tokenize"))
    assert isinstance(answer, Answer) and answer.chunk is not None
    assert (answer.chunk.token_ids, answer.outcome.usage) == ([*b"hi"], protocol.Usage(2, 0))


def test_detokenize_answers_with_the_text(intake: Intake) -> None:
    answer = accept(intake, Request(token_ids=[*"hé".encode()], task="detokenize"))
    assert isinstance(answer, Answer) and answer.chunk is not None
    assert answer.chunk.text == "hé"


def test_a_task_that_was_answered_already_only_ends(intake: Intake) -> None:
    answer = accept(intake, Request(prompt="hi", task="tokenize"), (Chunk(token_ids=[*b"hi"]),))
    assert isinstance(answer, Answer) and answer.chunk is None


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(token_ids=[1], task="tokenize"), "token_ids"),
        (Request(prompt="a", task="detokenize"), "token_ids"),
        (Request(token_ids=[VOCAB], task="detokenize"), "token_ids"),
    ],
)
def test_a_task_with_the_wrong_input_is_refused(intake: Intake, request_: Request, field: str) -> None:
    assert refusal(intake, request_).param == field


def test_a_loaded_model_is_not_changed(intake: Intake) -> None:
    model = loaded()
    before = replace(model)
    Intake(model, CONTEXT)
    assert before == model
