"""The engine's loop, with a model that writes letters which depend on what is in the pages."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import protocol
from broker.errors import InternalError, InvalidRequest, OutOfMemory
from broker.protocol import Chunk, Params, Request
from gpu_worker.exchange import Quit
from gpu_worker.grammar import GrammarState
from gpu_worker.sampler import Sampled
from gpu_worker.scheduler import Row

from .fakes import EOS, VOCAB, Bench, FakeRunner, FakeSampler, Heard, letters, loaded, saying

DEADLINE_S = 10.0


def expected(prompt: str, tokens: int) -> str:
    """What the letter model writes after a prompt, worked out without an engine."""
    known = [*prompt.encode()]
    for _ in range(tokens):
        known.append(letters(known))
    return bytes(known[-tokens:]).decode()


def assert_stream_has_no_gap(heard: Heard) -> None:
    at = 0
    for chunk in heard.chunks:
        assert chunk.start == at
        at += len(chunk.token_ids)


# ── generation ───────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_answered_token_by_token_and_ends_once() -> None:
    heard = Bench().ask("hello", max_tokens=5)
    assert heard.text == expected("hello", 5)
    assert [len(chunk.token_ids) for chunk in heard.chunks] == [1] * 5
    assert_stream_has_no_gap(heard)
    assert heard.outcome is not None
    assert heard.outcome.finish_reason == "length" and heard.outcome.usage == protocol.Usage(5, 5)


def test_the_seed_is_told() -> None:
    heard = Bench().ask(seed=77)
    assert heard.outcome is not None and heard.outcome.seed == 77


def test_many_requests_at_once_get_what_each_would_get_alone() -> None:
    bench = Bench(slots=3, step_tokens=16)
    prompts = [f"prompt {number} " * (number % 4 + 1) for number in range(12)]
    heard = [bench.submit(p, id=str(n), max_tokens=3 + n) for n, p in enumerate(prompts)]
    bench.finish()
    for number, prompt in enumerate(prompts):
        assert heard[number].text == expected(prompt, 3 + number)


def test_requests_join_while_others_run() -> None:
    bench = Bench()
    first = bench.submit("first", id="1", max_tokens=20)
    for _ in range(5):
        bench.step()
    second = bench.submit("second", id="2", max_tokens=3)
    bench.finish()
    assert (first.text, second.text) == (expected("first", 20), expected("second", 3))


def test_c39_eos_ends_the_request_and_its_text_is_not_output() -> None:
    heard = Bench(FakeRunner(saying("abc", 2))).ask("hi", max_tokens=50)
    assert (heard.text, heard.token_ids) == ("abc", [*b"abc", EOS])
    assert heard.outcome is not None
    assert (heard.outcome.finish_reason, heard.outcome.stop_reason) == ("stop", None)
    assert heard.outcome.usage.completion_tokens == 4


def test_a_stop_token_is_named_and_its_text_is_not_output() -> None:
    heard = Bench(FakeRunner(saying("abc", 2))).ask("hi", stop_token_ids=[ord("b")])
    assert heard.text == "a"
    assert heard.outcome is not None and heard.outcome.stop_reason == ord("b")


def test_ignore_eos_goes_on() -> None:
    script = saying("a\0b", 2)
    runner = FakeRunner(lambda tokens: EOS if script(tokens) == 0 else script(tokens))
    heard = Bench(runner).ask("hi", ignore_eos=True, max_tokens=3)
    assert (heard.text, heard.token_ids) == ("ab", [97, EOS, 98])


def test_c37_a_stop_string_across_tokens_never_leaves_the_worker() -> None:
    heard = Bench(FakeRunner(saying("Paris, the city", 2))).ask("hi", stop=["is, t"], max_tokens=50)
    assert heard.text == "Par"
    assert heard.outcome is not None
    assert (heard.outcome.finish_reason, heard.outcome.stop_reason) == ("stop", "is, t")


def test_what_was_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    heard = Bench(FakeRunner(saying("Pari", 2))).ask("hi", stop=["Paris"], max_tokens=50)
    assert heard.text == "Pari"


def test_c34_no_half_character_leaves_the_worker() -> None:
    text = "\U0001fae0 \U0001f979 \u9f9c"
    heard = Bench(FakeRunner(saying(text, 2))).ask("hi", max_tokens=50)
    assert heard.text == text
    assert all("\ufffd" not in chunk.text for chunk in heard.chunks)


def test_logprobs_come_with_each_token_and_its_bytes() -> None:
    bench = Bench(FakeRunner(saying("é", 2)), sampler=None)
    heard = bench.ask("hi", logprobs=2, max_tokens=2)
    reports = [report for chunk in heard.chunks for report in chunk.logprobs or []]
    assert [report.token_id for report in reports] == [*"é".encode()]
    assert [report.bytes for report in reports] == [[byte] for byte in "é".encode()]
    assert all(-0.01 < report.logprob <= 0 and len(report.top) == 2 for report in reports)
    assert reports[0].top[0].token_id == reports[0].token_id


# ── first chunk ──────────────────────────────────────────────────────────────────────────────────


def test_echo_is_in_the_first_chunk_only() -> None:
    heard = Bench().ask("hello", echo=True, max_tokens=3)
    assert [chunk.prompt_text for chunk in heard.chunks] == ["hello", None, None]
    assert heard.chunks[0].prompt_token_ids == [*b"hello"]
    assert heard.text == expected("hello", 3)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_c9_prompt_logprobs_are_in_the_first_chunk_however_many_steps_the_prompt_takes(
    max_tokens: int,
) -> None:
    prompt = "abcdefghijklmnopqrstuvwxyz0123456789"
    bench = Bench(step_tokens=16)
    bench.ask(prompt, id="before", max_tokens=1)  # whose pages must not be used
    heard = bench.ask(prompt, id="asked", echo=True, prompt_logprobs=1, max_tokens=max_tokens)
    reports = heard.chunks[0].prompt_logprobs
    assert reports is not None and reports[0] is None
    assert [r.token_id for r in reports if r] == [*prompt.encode()[1:]]
    for position, report in enumerate(reports[1:], start=1):
        assert report is not None
        assert report.top[0].token_id == letters([*prompt.encode()[:position]])
    assert all(chunk.prompt_logprobs is None for chunk in heard.chunks[1:])
    assert heard.text == (expected(prompt, max_tokens) if max_tokens else "")
    assert heard.outcome is not None and heard.outcome.usage == protocol.Usage(len(prompt), max_tokens)


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    bench = Bench(FakeRunner(pages=20), step_tokens=16, slots=4)
    old = [bench.submit("x" * 20 + str(n), id=f"old {n}", max_tokens=30) for n in range(2)]
    for _ in range(4):
        bench.step()
    asked = bench.submit("abcdefghijklmnop" * 2, id="asked", prompt_logprobs=0, max_tokens=4)
    bench.finish()
    reports = asked.chunks[0].prompt_logprobs
    assert reports is not None and [r.token_id for r in reports if r] == [*(b"abcdefghijklmnop" * 2)[1:]]
    assert all(heard.outcome for heard in old)


# ── tasks, bad requests, cancellation ────────────────────────────────────────────────────────────


def test_tokenize_and_detokenize_are_answered_without_a_step() -> None:
    bench = Bench()
    tokens = bench.ask(request=Request(prompt="hi", task="tokenize"))
    text = bench.ask(id="b", request=Request(token_ids=[104, 105], task="detokenize"))
    assert (tokens.token_ids, text.text) == ([104, 105], "hi")
    assert bench.engine.counters.steps == 0


def test_c46_a_bad_request_is_refused_and_the_others_are_unaffected() -> None:
    bench = Bench()
    good = bench.submit("good", id="good", max_tokens=5)
    bad = bench.submit([0, 5, 10_000_000], id="bad")
    bench.finish()
    assert isinstance(bad.error, InvalidRequest) and bad.error.param == "token_ids"
    assert good.text == expected("good", 5)


def test_a_request_that_can_never_fit_the_cache_is_refused_with_its_size_and_the_limit() -> None:
    bench = Bench(FakeRunner(pages=5, page_tokens=4))
    heard = bench.ask("hello", max_tokens=16)
    assert isinstance(heard.error, InvalidRequest)
    assert "21" in heard.error.message and "20" in heard.error.message
    assert bench.ask("hello", id="b", max_tokens=15).text == expected("hello", 15)


def test_a_stopped_request_says_nothing_more() -> None:
    bench = Bench()
    heard = bench.submit(max_tokens=100)
    for _ in range(3):
        bench.step()
    said = len(heard.chunks)
    bench.stop("a", "unknown")
    other = bench.ask("other", id="b")
    assert len(heard.chunks) <= said + 1 and not heard.ended
    assert other.outcome is not None
    assert bench.engine.counters.kv_pages_used == 0


def test_a_request_is_stopped_before_it_ever_ran() -> None:
    bench = Bench()
    bench.submit()
    bench.stop("a")
    bench.step()
    assert not bench.stopped["a"].chunks and bench.engine.counters.running == 0


# ── the log ──────────────────────────────────────────────────────────────────────────────────────

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def request_lines(bench: Bench) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in bench.log.getvalue().splitlines()]
    return [line for line in lines if line["event"] == "request"]


def test_a_request_leaves_one_line_by_which_an_operator_finds_it() -> None:
    bench = Bench()
    request = Request(
        prompt="secret", traceparent=TRACE, params=Params(temperature=0, max_tokens=3, ignore_eos=True)
    )
    bench.submit(request=request)
    bench.finish()
    (line,) = request_lines(bench)
    assert (line["request_id"], line["traceparent"], line["ended"]) == ("request-a", TRACE, "length")
    assert line["output_tokens"] == 3
    assert isinstance(line["prompt_tokens"], int) and isinstance(line["seconds"], float)
    assert "secret" not in bench.log.getvalue()


def test_a_cancelled_request_leaves_its_line_too() -> None:
    bench = Bench()
    bench.submit(max_tokens=100, ignore_eos=True)
    bench.step()
    bench.stop("a")
    bench.step()
    assert [line["ended"] for line in request_lines(bench)] == ["cancelled"]


def test_prompts_are_in_the_log_only_where_they_may_be() -> None:
    bench = Bench(log_prompts=True)
    bench.submit("hello", max_tokens=3, ignore_eos=True)
    bench.finish()
    (line,) = request_lines(bench)
    assert "hello" in str(line["prompt"]) and line["output"]


# ── the prefix cache, preemption, continuation: never another text ───────────────────────────────


def test_a_prefix_cache_hit_gives_the_same_text() -> None:
    bench = Bench()
    first = bench.ask("a long shared prompt", id="1", max_tokens=9)
    second = bench.ask("a long shared prompt", id="2", max_tokens=9)
    assert first.text == second.text == expected("a long shared prompt", 9)
    assert second.outcome is not None and second.outcome.usage.cached_tokens == 16
    assert bench.engine.counters.cached_tokens == 16


def test_preemption_under_page_pressure_gives_the_same_text() -> None:
    bench = Bench(FakeRunner(pages=12), slots=6)
    heard = {n: bench.submit(f"request {n}", id=str(n), max_tokens=30) for n in range(6)}
    bench.finish()
    for number, one in heard.items():
        assert one.text == expected(f"request {number}", 30)
        assert_stream_has_no_gap(one)
    assert bench.engine.counters.preemptions > 0


@pytest.mark.parametrize("cut", range(0, 13))
@pytest.mark.parametrize("params", [{}, {"stop": ["zzz", "fg"]}])
def test_a_continuation_from_any_cut_gives_the_same_text(cut: int, params: dict[str, Any]) -> None:
    whole = Bench().ask("hello", max_tokens=12, echo=True, **params)
    delivered = whole.chunks[:cut]
    bench = Bench()
    bench.ask("neighbour", id="n", max_tokens=2)
    rest = bench.ask("hello", max_tokens=12, echo=True, chunks=delivered, **params)
    both = Heard(delivered + rest.chunks)
    assert (both.text, both.token_ids) == (whole.text, whole.token_ids)
    assert_stream_has_no_gap(both)
    assert [chunk.prompt_text for chunk in both.chunks].count("hello") == 1
    assert rest.outcome is not None and whole.outcome is not None
    assert rest.outcome.finish_reason == whole.outcome.finish_reason
    assert rest.outcome.usage.completion_tokens == whole.outcome.usage.completion_tokens


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 10),  # arrives at this step
            st.text("ab", min_size=1, max_size=24),
            st.integers(1, 20),
            st.sampled_from(["run", "stop", "fault"]),
        ),
        min_size=1,
        max_size=8,
    ),
    pages=st.integers(12, 40),
    slots=st.integers(1, 5),
    step_tokens=st.sampled_from([16, 64]),
)
@patch("gpu_worker.faults._free_memory", lambda: None)  # collecting garbage takes a while
def test_whatever_happens_around_it_a_request_gets_its_own_text(
    requests: list[tuple[int, str, int, str]], pages: int, slots: int, step_tokens: int
) -> None:
    runner = FakeRunner(pages=pages)
    bench = Bench(runner, slots=slots, step_tokens=step_tokens)
    pending = sorted(enumerate(requests), key=lambda entry: entry[1][0])
    stopped = []
    for step_number in range(12):
        for number, (at, prompt, tokens, fate) in pending:
            if at != step_number:
                continue
            bench.submit(prompt, id=str(number), max_tokens=tokens)
            if fate == "stop":
                stopped.append(str(number))
            if fate == "fault" and not runner.faults:
                runner.faults.append(torch.OutOfMemoryError("CUDA out of memory"))
        bench.step()
        if step_number % 3 == 2 and stopped:
            bench.stop(stopped.pop())
    bench.stop(*stopped)
    bench.step()
    bench.finish()
    for id, heard in bench.heard.items():
        _, prompt, tokens, _ = requests[int(id)]
        assert heard.text == expected(prompt, tokens)
    assert bench.engine._scheduler.pages.used == 0


# ── faults ───────────────────────────────────────────────────────────────────────────────────────


def raising(word: str, at: int, problem: Exception) -> FakeRunner:
    """A model that can't take a sequence which begins with `word` and has `at` tokens."""

    def next_token(tokens: Sequence[int]) -> int:
        if bytes(tokens[: len(word)]) == word.encode() and len(tokens) == at:
            raise problem
        return letters(tokens)

    return FakeRunner(next_token)


def test_c49_an_exception_in_a_step_fails_the_guilty_request_only() -> None:
    bench = Bench(raising("bad", 5, ValueError("boom")))
    good = [bench.submit(f"good {n}", id=str(n), max_tokens=9) for n in range(3)]
    bad = bench.submit("bad", id="bad")
    bench.finish()
    assert isinstance(bad.error, InternalError) and "boom" not in bad.error.message
    assert bad.text == expected("bad", 2)
    assert [one.text for one in good] == [expected(f"good {n}", 9) for n in range(3)]
    assert "boom" in bench.log.getvalue()
    assert bench.ask("next", id="next").text == expected("next", 8)


def test_a_row_of_nan_fails_alone_and_nobody_shares_its_pages() -> None:
    def next_token(tokens: Sequence[int]) -> int:
        return VOCAB - 1 if bytes(tokens[:3]) == b"bad" else letters(tokens)

    class NanSampler(FakeSampler):
        def sample(self, logits: torch.Tensor, sequences: Any) -> list[Sampled]:
            sick = [bool(row.argmax() == VOCAB - 1) for row in logits]
            logits[torch.tensor(sick)] = float("nan")
            return bench_sampler.sample(logits, sequences)

    bench_sampler = Bench(sampler=None).engine._fault_finder._sampler
    bench = Bench(FakeRunner(next_token), sampler=NanSampler())
    good, bad = bench.submit("good", id="good"), bench.submit("bad request", id="bad")
    bench.finish()
    assert isinstance(bad.error, InternalError)
    assert good.text == expected("good", 8)
    again = bench.ask("bad request", id="again")
    assert again.error is not None
    assert bench.runner.rows[-1] == [("again", len("bad request"))]


def test_a_grammars_dead_end_is_its_own_requests_error_however_often(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead_end(state: GrammarState) -> torch.Tensor:
        raise InternalError("The grammar can't go on: too many items")

    monkeypatch.setattr(GrammarState, "mask", dead_end)
    bench = Bench(sampler=None)
    params = Params(max_tokens=20, temperature=0, grammar=protocol.Grammar("regex", "[0-9]{3}"))
    for number in range(5):
        bad = bench.ask(request=Request(prompt="hi", params=params), id=str(number))
        assert isinstance(bad.error, InternalError) and "too many items" in bad.error.message
    good = bench.submit("good", id="good")
    bench.submit(request=Request(prompt="hi", params=params), id="beside")
    bench.finish()
    assert good.text == expected("good", 8)


def test_an_exception_in_postprocessing_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    good, bad = bench.submit("good", id="good"), bench.submit("bad", id="bad")
    bench.step()
    text = bench.engine._in_hand["bad"].text
    monkeypatch.setattr(text, "push", lambda token: 1 / 0)
    bench.finish()
    assert isinstance(bad.error, InternalError)
    assert good.text == expected("good", 8)


def test_c52_out_of_memory_once_is_retried_and_nobody_notices() -> None:
    bench = Bench()
    heard = [bench.submit(f"request {n}", id=str(n)) for n in range(4)]
    bench.step()
    bench.runner.faults.append(torch.OutOfMemoryError("CUDA out of memory"))
    bench.finish()
    assert [one.text for one in heard] == [expected(f"request {n}", 8) for n in range(4)]


def test_c52_a_large_prompt_that_finds_no_memory_is_tried_in_smaller_pieces() -> None:
    class Small(FakeRunner):
        def forward(self, rows: Sequence[Row]) -> torch.Tensor:
            if sum(row.tokens for row in rows) > 20:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(rows)

    bench = Bench(Small(), step_tokens=64)
    heard = bench.ask("x" * 60, max_tokens=4)
    assert heard.text == expected("x" * 60, 4)
    assert bench.engine._scheduler.budget < 64


def test_c52_only_the_request_that_never_fits_fails_and_the_next_one_works() -> None:
    bench = Bench(raising("bad", 4, torch.OutOfMemoryError("CUDA out of memory")))
    good, bad = bench.submit("good", id="good"), bench.submit("bad", id="bad")
    bench.finish()
    assert isinstance(bad.error, OutOfMemory)
    assert good.text == expected("good", 8)
    assert bench.ask("next", id="next").text == expected("next", 8)


def test_an_answer_too_long_for_a_frame_is_refused_before_zeromq_cuts_the_worker_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpu_worker.engine.MAX_FRAME_BYTES", 1000)
    bench = Bench()
    long = bench.submit("x" * 60, id="long", prompt_logprobs=5)
    good = bench.submit("good", id="good")
    many = bench.submit(id="many", request=Request(prompt="y" * 2000, task="tokenize"))
    bench.finish()
    assert isinstance(long.error, InvalidRequest) and long.error.param == "prompt_logprobs"
    assert isinstance(many.error, InvalidRequest) and many.error.param == "prompt"
    assert good.text == expected("good", 8)


def test_a_device_assert_ends_the_thread_and_hands_back_who_is_not_suspect() -> None:
    bench = Bench(slots=2)
    for name in "abc":
        bench.submit(f"{name}'s prompt", id=name, max_tokens=100)
    bench.runner.faults.append(RuntimeError("CUDA error: device-side assert triggered"))
    run_thread(bench).join(DEADLINE_S)
    assert bench.died is not None and "device-side assert" in bench.died.reason
    assert set(bench.died.suspects) == {"a", "b"}
    assert [id for id, heard in bench.heard.items() if heard.handed_back] == ["c"]


def test_a_step_in_which_every_row_fails_on_its_own_is_the_engines_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Both must be taken in before the first step, however slow the machine is.
    monkeypatch.setattr("gpu_worker.engine._INTAKE_S", DEADLINE_S)
    bench = Bench(FakeRunner(lambda tokens: 1 // 0))
    bench.submit("one", id="a")
    bench.submit("two", id="b")
    run_thread(bench).join(DEADLINE_S)
    assert bench.died is not None and set(bench.died.suspects) == {"a", "b"}


def test_a_single_request_that_fails_does_not_end_the_engine_but_three_in_a_row_do() -> None:
    bench = Bench(FakeRunner(lambda tokens: 1 // 0))
    assert bench.ask(id="a").error is not None
    assert bench.ask(id="b").error is not None
    bench.submit(id="c")
    run_thread(bench).join(DEADLINE_S)
    assert bench.died is not None and bench.died.suspects == ("c",)


# ── the thread ───────────────────────────────────────────────────────────────────────────────────


def run_thread(bench: Bench) -> threading.Thread:
    thread = threading.Thread(target=bench.engine.run, daemon=True)
    thread.start()
    return thread


def wait_for(condition: Any) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


def test_the_thread_serves_until_it_is_told_to_quit() -> None:
    bench = Bench()
    thread = run_thread(bench)
    heard = bench.submit()
    wait_for(lambda: heard.ended)
    bench.engine.inbox.put(Quit())
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and bench.died is None
    assert heard.text == expected("hello", 8)


def test_c51_an_idle_engine_uses_no_processor_and_then_serves() -> None:
    bench = Bench()
    thread = run_thread(bench)
    used = time.process_time()
    until = time.monotonic() + 1.5  # past the check of the idle
    wait_for(lambda: time.monotonic() > until)
    waited = bench.submit()
    wait_for(lambda: waited.ended)
    assert waited.text == expected("hello", 8)
    assert time.process_time() - used < 0.75
    bench.engine.inbox.put(Quit())
    thread.join(DEADLINE_S)


def test_a_flood_of_requests_does_not_stop_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(slots=2)
    running = bench.submit(id="running", max_tokens=100)
    bench.step()
    monkeypatch.setattr("gpu_worker.engine._INTAKE_S", 0.0)
    for number in range(50):
        bench.submit(id=str(number))
    said = len(running.chunks)
    for _ in range(5):
        bench.step()
    assert len(running.chunks) == said + 5


def test_counters_say_what_was_done() -> None:
    bench = Bench()
    bench.ask("hello", max_tokens=5)
    counters = bench.engine.counters
    assert (counters.prompt_tokens, counters.generated_tokens, counters.steps) == (5, 5, 5)
    assert (counters.running, counters.kv_pages_used, counters.kv_pages_total) == (0, 0, 64)


def test_running_and_used_pages_are_told_while_it_runs() -> None:
    bench = Bench()
    bench.submit("hello")
    bench.step()
    assert (bench.engine.counters.running, bench.engine.counters.kv_pages_used) == (1, 2)


def test_chunks_of_a_resumed_request_start_where_the_last_worker_stopped() -> None:
    delivered = [Chunk(token_ids=[*expected("hello", 3).encode()], text=expected("hello", 3))]
    heard = Bench().ask("hello", chunks=delivered)
    assert heard.chunks[0].start == 3
    assert heard.outcome is not None and heard.outcome.usage.completion_tokens == 8


def test_a_grammar_holds_whatever_the_model_wants() -> None:
    bench = Bench(sampler=None, model=loaded())
    grammar = protocol.Grammar("regex", "[0-9]{3}")
    request = Request(prompt="hi", params=Params(max_tokens=20, temperature=1.0, seed=3, grammar=grammar))
    heard = bench.ask(request=request)
    assert len(heard.text) == 3 and heard.text.isdigit()
    assert heard.outcome is not None and heard.outcome.finish_reason == "stop"
