"""The whole engine over tiny random models: the text is transformers' own, whatever happens around it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from broker.errors import OutOfMemory
from broker.protocol import Chunk, Grammar
from gpu_worker.loading import LoadedModel
from gpu_worker.runner import Runner

from . import tiny_models
from .fakes import EOS, VOCAB, Bench, Heard, loaded, tokenizer

ARCHITECTURES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "mixtral",
    "qwen3_moe",
]
CONTEXT = 256


def of(model: Any, **changes: Any) -> LoadedModel:
    weight = next(model.parameters())
    fields = {
        "model": model,
        "config": model.config,
        "device": weight.device,
        "dtype": weight.dtype,
        "context": CONTEXT,
        "eos_ids": frozenset({EOS}),
    }
    return loaded(**{**fields, **changes})


def bench(model: Any, *, pages: int = 0, told: dict[str, Any] | None = None, **settings: Any) -> Bench:
    """A real runner and a real sampler over `model`; with `pages`, only so many may be used."""
    chosen = {"slots": 6, "step_tokens": 32, **settings}
    runner = tiny_models.runner(
        model, page_tokens=4, slots=chosen["slots"], step_tokens=chosen["step_tokens"]
    )
    if pages:
        assert pages <= runner.pages_total
        runner.pages_total = pages
    return Bench(runner, sampler=None, model=of(model, **(told or {})), **chosen)


@cache
def llama() -> Any:
    return tiny_models.build("llama", vocab_size=VOCAB)


def prompts(count: int, *, most: int = 40, seed: int = 1) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most + 1, (count,), generator=draw).tolist()
    # From 3: `generate` would take 0 for padding and not look at it.
    return [torch.randint(3, EOS, (length,), generator=draw).tolist() for length in lengths]


def run_joining(engine: Bench, requests: list[dict[str, Any]], *, each: int = 2) -> list[Heard]:
    """Submit a request every `each` steps, so that they join and leave a running batch."""
    heard = []
    for number, request in enumerate(requests):
        heard.append(engine.submit(id=str(number), **request))
        for _ in range(each):
            engine.step()
    engine.finish()
    return heard


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_twenty_prompts_with_joins_and_leaves_get_what_generate_says(architecture: str) -> None:
    model = tiny_models.build(architecture, vocab_size=VOCAB)
    asked = prompts(20)
    lengths = [6 + number % 5 * 4 for number in range(20)]
    expected = [tiny_models.generated(model, p, n)[len(p) :] for p, n in zip(asked, lengths, strict=True)]
    engine = bench(model)
    heard = run_joining(
        engine,
        [{"prompt": p, "max_tokens": n, "ignore_eos": True} for p, n in zip(asked, lengths, strict=True)],
        each=1,
    )
    assert [one.token_ids for one in heard] == expected
    assert len({tuple(tokens) for tokens in expected}) > 10, "the model says the same to everybody"


def agreeing(model: Any, asked: list[list[int]], heard: list[Heard], tokens: int) -> int:
    """How many answers are what `generate` says, up to a token at which the model can't decide.

    In bfloat16 the likeliest two tokens of a random model often have the very same logit; where an answer
    leaves `generate`'s, its token must be as likely as the other one, within the rounding.
    """
    expected = [tiny_models.generated(model, p, tokens)[len(p) :] for p in asked]
    return sum(
        _agrees(model, prompt, right, one.token_ids)
        for prompt, right, one in zip(asked, expected, heard, strict=True)
    )


def _agrees(model: Any, prompt: list[int], right: list[int], found: list[int]) -> bool:
    parting = next((n for n, (a, b) in enumerate(zip(right, found, strict=True)) if a != b), None)
    if parting is None:
        return True
    before = torch.tensor([prompt + right[:parting]], device=model.device)
    with torch.inference_mode():
        logits = model(before).logits[0, -1].float()
    return bool((logits[right[parting]] - logits[found[parting]]).abs() < 0.05 * logits.std())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "phi3", "mixtral"])
def test_in_bfloat16_nine_of_ten_prompts_get_what_generate_says(architecture: str) -> None:
    model = tiny_models.build(architecture, vocab_size=VOCAB, dtype=torch.bfloat16)
    asked = prompts(20)
    heard = run_joining(
        bench(model), [{"prompt": p, "max_tokens": 32, "ignore_eos": True} for p in asked], each=1
    )
    assert agreeing(model, asked, heard, 32) >= 18


def test_c39_a_list_of_eos_ids_ends_on_any_of_them() -> None:
    (prompt,) = prompts(1)
    text = tiny_models.generated(llama(), prompt, 12)[len(prompt) :]
    ends = text[5]
    engine = bench(llama(), told={"eos_ids": frozenset({EOS, ends})})
    heard = engine.ask(prompt, max_tokens=12)
    assert heard.token_ids == text[: text.index(ends) + 1]
    assert heard.outcome is not None and heard.outcome.finish_reason == "stop"


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_c42_c43_padding_settings_of_the_tokenizer_change_nothing(padding_side: str) -> None:
    model = tiny_models.build("gpt2", vocab_size=VOCAB, pad_token_id=None)
    short, long = "Hi there!", "a prompt that is forty tokens long, or so"
    alone = [bench(model).ask(p, max_tokens=10, ignore_eos=True).token_ids for p in (short, long)]
    configured = tokenizer()
    assert configured.pad_token is None
    before, configured.padding_side = configured.padding_side, padding_side
    try:
        engine = bench(model, told={"tokenizer": configured})
        together = [engine.submit(p, id=p, max_tokens=10, ignore_eos=True) for p in (short, long)]
        engine.finish()
    finally:
        configured.padding_side = before
    assert [heard.token_ids for heard in together] == alone


def test_c45_a_seed_gives_the_same_tokens_alone_and_under_load() -> None:
    (prompt,) = prompts(1, seed=5)
    request = {"prompt": prompt, "temperature": 1.0, "seed": 42, "max_tokens": 16, "ignore_eos": True}
    alone = bench(llama()).ask(**request).token_ids
    assert bench(llama()).ask(**{**request, "seed": 43}).token_ids != alone
    for round in range(5):
        engine = bench(llama(), slots=20, step_tokens=64)
        load = [
            {"prompt": p, "temperature": 0.9, "seed": n, "max_tokens": 5 + n, "ignore_eos": True}
            for n, p in enumerate(prompts(20, seed=round + 10))
        ]
        load.insert(round * 4, request)
        heard = run_joining(engine, load, each=round % 2)
        assert heard[round * 4].token_ids == alone


def test_preemption_under_page_pressure_gives_the_same_tokens() -> None:
    asked = prompts(6, most=12, seed=2)
    roomy, tight = bench(llama()), bench(llama(), pages=16)
    requests = [
        {"prompt": p, "max_tokens": 30, "temperature": 0.8, "seed": n, "ignore_eos": True}
        for n, p in enumerate(asked)
    ]
    expected = [heard.token_ids for heard in run_joining(roomy, requests)]
    found = [heard.token_ids for heard in run_joining(tight, requests)]
    assert tight.engine.counters.preemptions > 0 and roomy.engine.counters.preemptions == 0
    assert found == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
        {"logit_bias": [(65, 9.0), (66, 9.0)], "stop": ["ABBA", "BAB"]},
        {"min_tokens": 8, "stop_token_ids": list(range(100))},
        {"grammar": Grammar("regex", "([a-c]{2,3}-)+[0-9]{4}")},
        {"echo": True, "prompt_logprobs": 1},
    ],
    ids=lambda params: ", ".join(params),
)
def test_a_continuation_from_any_cut_gives_the_same_answer(params: dict[str, Any]) -> None:
    (prompt,) = prompts(1, seed=7)
    request = {"prompt": prompt, "temperature": 1.0, "seed": 3, "max_tokens": 16, **params}
    whole = bench(llama()).ask(**request)
    assert whole.outcome is not None and len(whole.chunks) > 4
    other = bench(llama())
    other.submit(prompts(1, seed=8)[0], id="neighbour", max_tokens=30)
    for cut in range(len(whole.chunks) + 1):
        rest = other.ask(**request, id=f"cut {cut}", chunks=whole.chunks[:cut])
        both = Heard(whole.chunks[:cut] + rest.chunks)
        assert (both.token_ids, both.text) == (whole.token_ids, whole.text), f"after {cut} chunks"
        assert_one_report_per_token(both, params)
        assert rest.outcome is not None
        assert (rest.outcome.finish_reason, rest.outcome.stop_reason, rest.outcome.seed) == (
            whole.outcome.finish_reason,
            whole.outcome.stop_reason,
            3,
        )
        assert rest.outcome.usage.completion_tokens == len(whole.token_ids)


def assert_one_report_per_token(heard: Heard, params: dict[str, Any]) -> None:
    reports = [report.token_id for chunk in heard.chunks for report in chunk.logprobs or []]
    assert reports == (heard.token_ids if "logprobs" in params else [])
    openings = [chunk.prompt_logprobs is not None for chunk in heard.chunks]
    assert openings.count(True) == ("prompt_logprobs" in params)


def test_prefix_cache_hits_give_the_same_tokens() -> None:
    shared = prompts(1, seed=9, most=40)[0] + list(range(20))
    requests = [
        {"prompt": [*shared, *p], "max_tokens": 10, "temperature": 0.7, "seed": n, "ignore_eos": True}
        for n, p in enumerate(prompts(8, most=9, seed=10))
    ]
    without = bench(llama(), prefix_cache=False)
    expected = [heard.token_ids for heard in run_joining(without, requests)]
    assert without.engine.counters.cached_tokens == 0
    cached = bench(llama())
    found = [heard.token_ids for heard in run_joining(cached, requests)]
    assert cached.engine.counters.cached_tokens >= 7 * (len(shared) // 4 * 4)
    assert found == expected


def test_prompt_logprobs_are_those_of_one_plain_forward() -> None:
    prompt = prompts(1, seed=11, most=40)[0] + list(range(40, 75))
    llama().set_attn_implementation("eager")
    with torch.inference_mode():
        plain = llama()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    engine = bench(llama())
    engine.submit(prompts(1, seed=12)[0], id="neighbour", max_tokens=30)
    heard = engine.ask(prompt, prompt_logprobs=3, max_tokens=1)
    reports = heard.chunks[0].prompt_logprobs
    assert reports is not None and len(reports) == len(prompt) and reports[0] is None
    for position, report in enumerate(reports[1:], start=1):
        assert report is not None and report.token_id == prompt[position]
        assert report.logprob == pytest.approx(plain[position - 1, prompt[position]].item(), abs=1e-3)
        assert report.top[0].token_id == plain[position - 1].argmax()


def test_c52_out_of_memory_in_the_real_runner_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(5, seed=13)
    requests = [{"prompt": p, "max_tokens": 8, "ignore_eos": True} for p in asked]
    expected = [heard.token_ids for heard in run_joining(bench(llama()), requests)]
    engine = bench(llama())
    fails_above(monkeypatch, engine.runner, tokens=12)
    monkeypatch.setattr("gpu_worker.faults._free_memory", lambda: None)  # it takes a while, and often
    assert [heard.token_ids for heard in run_joining(engine, requests)] == expected


def test_c52_a_request_for_which_there_is_no_memory_fails_and_the_next_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = bench(llama())
    with monkeypatch.context() as starving:
        fails_above(starving, engine.runner, tokens=0)
        assert isinstance(engine.ask([1, 2, 3]).error, OutOfMemory)
    assert engine.ask([1, 2, 3], id="next").outcome is not None


def fails_above(monkeypatch: pytest.MonkeyPatch, runner: Runner, *, tokens: int) -> None:
    real = runner.forward

    def forward(rows: Any) -> torch.Tensor:
        if sum(row.tokens for row in rows) > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(rows)

    monkeypatch.setattr(runner, "forward", forward)


def test_pages_that_held_nan_do_no_harm_to_whoever_gets_them_next() -> None:
    engine = bench(llama(), pages=16)
    for layer in engine.runner._caches:
        for pages in layer:
            pages.fill_(float("nan"))
    (prompt,) = prompts(1, seed=14, most=20)
    heard = engine.ask(prompt, max_tokens=10, ignore_eos=True)
    assert heard.token_ids == tiny_models.generated(llama(), prompt, 10)[len(prompt) :]


def test_a_stream_that_was_cut_in_the_middle_of_a_character_goes_on() -> None:
    chunk = Chunk(token_ids=[*"é".encode()[:1]], text="")
    engine = bench(llama())
    heard = engine.ask([1, 2, 3], chunks=[chunk], max_tokens=6, ignore_eos=True)
    assert heard.chunks[0].start == 1 and len(heard.token_ids) == 5
