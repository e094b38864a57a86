"""Every back end against attention written out longhand, over scattered pages and mixed rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_worker import native
from gpu_worker.attention import Attend, LayerPlan, PagedInput, cpu, gathered, varlen

PAGE_TOKENS, PAGES = 4, 40
#: (tokens of the step, tokens in the cache with them): a prompt chunk, decoding rows, a fresh prompt.
ROWS = [(1, 9), (5, 5), (1, 1), (7, 30), (1, 70)]
PLAN = LayerPlan(
    query_heads=6, kv_heads=2, key_dim=32, value_dim=32, scaling=0.2, window=0, softcap=0.0, sinks=False
)
PLANS = {
    "grouped": PLAN,
    "one head each": replace(PLAN, kv_heads=6),
    "window": replace(PLAN, window=6),
    "window of one": replace(PLAN, window=1),
    "softcap": replace(PLAN, softcap=1.5),
    "sinks": replace(PLAN, sinks=True),
    "all": replace(PLAN, window=11, softcap=2.0, sinks=True),
    "odd sizes": replace(PLAN, key_dim=24, value_dim=20),
    "large heads": replace(PLAN, key_dim=80, value_dim=80, query_heads=4),
}


class Case:
    """Random rows over pages in random order, and the answer."""

    def __init__(self, plan: LayerPlan, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(dtype)

        self.plan = plan
        by_head = [random(PAGES, plan.kv_heads, PAGE_TOKENS, dim) for dim in (plan.key_dim, plan.value_dim)]
        self.cache = (by_head[0].transpose(1, 2), by_head[1].transpose(1, 2))
        tokens = sum(count for count, _ in ROWS)
        self.query = random(tokens, plan.query_heads, plan.key_dim)
        self.key = random(tokens, plan.kv_heads, plan.key_dim)
        self.value = random(tokens, plan.kv_heads, plan.value_dim)
        self.sinks = random(plan.query_heads) if plan.sinks else None
        free = torch.randperm(PAGES, generator=draw).tolist()
        width = max(-(-context // PAGE_TOKENS) for _, context in ROWS)
        self.table = torch.zeros(len(ROWS), width, dtype=torch.int32)
        for row, (_, context) in enumerate(ROWS):
            for page in range(-(-context // PAGE_TOKENS)):
                self.table[row, page] = free.pop()

    def slot(self, row: int, position: int) -> int:
        return int(self.table[row, position // PAGE_TOKENS]) * PAGE_TOKENS + position % PAGE_TOKENS

    def run(self, attend: Attend, padding: int = 0) -> Tensor:
        starts = [0]
        for count, _ in ROWS:
            starts.append(starts[-1] + count)
        slots = [
            self.slot(row, position)
            for row, (count, context) in enumerate(ROWS)
            for position in range(context - count, context)
        ]
        paged = PagedInput(
            slots=torch.tensor(slots),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context=torch.tensor([context for _, context in ROWS], dtype=torch.int32),
            page_table=self.table,
            query_lens=[count for count, _ in ROWS],
            context_lens=[context for _, context in ROWS],
            most_query=max(count for count, _ in ROWS),
            most_context=max(context for _, context in ROWS),
            caches=[self.cache],
            layers=[self.plan],
            attend=attend,
        )
        return attend(self.query, self.key, self.value, paged, 0, self.sinks)

    def longhand(self) -> Tensor:
        """One query at a time, in double precision."""
        keys, values = (pages.double().clone() for pages in self.cache)
        answer, token = [], 0
        for row, (count, context) in enumerate(ROWS):
            for position in range(context - count, context):
                page, offset = divmod(self.slot(row, position), PAGE_TOKENS)
                keys[page, offset] = self.key[token].double()
                values[page, offset] = self.value[token].double()
                token += 1
        token = 0
        for row, (count, context) in enumerate(ROWS):
            for position in range(context - count, context):
                first = max(0, position - self.plan.window + 1) if self.plan.window else 0
                seen = [divmod(self.slot(row, at), PAGE_TOKENS) for at in range(first, position + 1)]
                answer.append(
                    torch.stack(
                        [self._head(token, h, keys, values, seen) for h in range(self.plan.query_heads)]
                    )
                )
                token += 1
        return torch.stack(answer)

    def _head(
        self, token: int, head: int, keys: Tensor, values: Tensor, seen: list[tuple[int, int]]
    ) -> Tensor:
        shared = head // (self.plan.query_heads // self.plan.kv_heads)
        query = self.query[token, head].double()
        scores = [float(query @ keys[page, offset, shared]) * self.plan.scaling for page, offset in seen]
        if self.plan.softcap:
            scores = [self.plan.softcap * math.tanh(score / self.plan.softcap) for score in scores]
        if self.sinks is not None:
            scores.append(float(self.sinks[head]))
        weights = torch.softmax(torch.tensor(scores, dtype=torch.double), 0)
        mixed = torch.zeros(self.plan.value_dim, dtype=torch.double)
        for weight, (page, offset) in zip(weights, seen, strict=False):
            mixed += weight * values[page, offset, shared]
        return mixed


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    native.load(native.cache_directory(""))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("attend", [gathered.attend, cpu.attend], ids=["gathered", "cpu"])
def test_a_back_end_computes_attention(attend: Attend, plan: LayerPlan, dtype: torch.dtype) -> None:
    case = Case(plan, dtype)
    expected = case.longhand()

    answer = case.run(attend)

    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(answer.double(), expected, rtol=tolerance, atol=tolerance)


class Texts:
    """Keys and values of whole texts, computed in steps over a cache that holds nothing but NaN at first."""

    def __init__(self, plan: LayerPlan, dtype: torch.dtype, page_tokens: int) -> None:
        draw = torch.Generator().manual_seed(5)
        self.plan, self.page_tokens = plan, page_tokens
        self.lengths = [context for _, context in ROWS]
        self.query, self.key, self.value = (
            [torch.randn(length, heads, dim, generator=draw).to(dtype) for length in self.lengths]
            for heads, dim in (
                (plan.query_heads, plan.key_dim),
                (plan.kv_heads, plan.key_dim),
                (plan.kv_heads, plan.value_dim),
            )
        )
        self.sinks = torch.randn(plan.query_heads, generator=draw).to(dtype) if plan.sinks else None
        width = max(-(-length // page_tokens) for length in self.lengths)
        pages = torch.randperm(width * len(ROWS), generator=draw, dtype=torch.int32)
        self.table = pages.view(len(ROWS), width)
        shape = (width * len(ROWS), plan.kv_heads, page_tokens)
        self.caches = [
            torch.full((*shape, dim), torch.nan, dtype=dtype).transpose(1, 2)
            for dim in (plan.key_dim, plan.value_dim)
        ]

    def step(self, first: list[int], end: list[int]) -> Tensor:
        """Tokens [first, end) of each text; a text with none isn't in the step."""
        rows = [row for row in range(len(ROWS)) if end[row] > first[row]]
        counts = [end[row] - first[row] for row in rows]
        slots = [
            int(self.table[row, at // self.page_tokens]) * self.page_tokens + at % self.page_tokens
            for row in rows
            for at in range(first[row], end[row])
        ]
        paged = PagedInput(
            slots=torch.tensor(slots),
            query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            context=torch.tensor([end[row] for row in rows], dtype=torch.int32),
            page_table=self.table[rows].contiguous(),
            query_lens=counts,
            context_lens=[end[row] for row in rows],
            most_query=max(counts),
            most_context=max(end[row] for row in rows),
            caches=[(self.caches[0], self.caches[1])],
            layers=[self.plan],
            attend=cpu.attend,
        )
        query, key, value = (
            torch.cat([of[row][first[row] : end[row]] for row in rows])
            for of in (self.query, self.key, self.value)
        )
        return cpu.attend(query, key, value, paged, 0, self.sinks)

    def exact(self, row: int, position: int) -> Tensor:
        """The answer at one position, in double precision."""
        plan = self.plan
        first = max(0, position - plan.window + 1) if plan.window else 0
        heads = []
        for head in range(plan.query_heads):
            shared = head // (plan.query_heads // plan.kv_heads)
            keys = self.key[row][first : position + 1, shared].double()
            scores = keys @ self.query[row][position, head].double() * plan.scaling
            if plan.softcap:
                scores = plan.softcap * torch.tanh(scores / plan.softcap)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks[head].double().view(1)])
            weights = torch.softmax(scores, 0)[: len(keys)]
            heads.append(weights @ self.value[row][first : position + 1, shared].double())
        return torch.stack(heads)


@pytest.mark.parametrize("page_tokens", [4, 16, 24, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_cpu_kernel_finds_what_it_wrote_however_it_lays_out_its_pages(
    plan: LayerPlan, dtype: torch.dtype, page_tokens: int
) -> None:
    texts = Texts(plan, dtype, page_tokens)
    middle = [length - count for count, length in ROWS]
    texts.step([0] * len(ROWS), middle)

    answer = texts.step(middle, texts.lengths)

    asked = [(row, at) for row, length in enumerate(texts.lengths) for at in range(middle[row], length)]
    expected = torch.stack([texts.exact(row, at) for row, at in asked])
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(answer.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_prompt_in_pieces_has_the_answer_of_the_whole_to_the_bit(plan: LayerPlan) -> None:
    """So that a stream that goes on elsewhere, its text computed in other pieces, goes on alike."""
    pieces, whole = (Texts(plan, torch.bfloat16, 16) for _ in range(2))
    texts = [min(length, 40) for length in whole.lengths]
    at_once = whole.step([0] * len(ROWS), whole.lengths)
    first = pieces.step([0] * len(ROWS), texts)
    last = pieces.step(texts, whole.lengths)
    starts = [0, *itertools.accumulate(whole.lengths)]
    cut = [0, *itertools.accumulate(texts)]
    for row, end in enumerate(texts):
        assert torch.equal(at_once[starts[row] : starts[row] + end], first[cut[row] : cut[row] + end])
    assert torch.equal(at_once[starts[4] + 40 : starts[5]], last)


def test_the_cpu_kernel_says_the_same_on_two_threads_as_on_one() -> None:
    case = Case(PLANS["all"], torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = case.run(cpu.attend)
        torch.set_num_threads(2)
        for _ in range(200):
            assert torch.equal(case.run(cpu.attend), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("attend", [gathered.attend, cpu.attend], ids=["gathered", "cpu"])
def test_a_row_that_is_not_a_number_spoils_no_other(attend: Attend) -> None:
    case = Case(PLAN, torch.float32)
    well = case.run(attend)
    case.query[0] = float("nan")

    ill = case.run(attend)

    assert ill[0].isnan().all()
    assert torch.equal(ill[1:], well[1:])


def test_varlen_is_refused_by_the_features_name() -> None:
    half = torch.bfloat16
    assert varlen.unsuited([PLAN, PLANS["softcap"]], half) == "soft caps"
    assert varlen.unsuited([PLANS["sinks"]], half) == "attention sinks"
    assert "float32" in str(varlen.unsuited([PLAN], torch.float32))
    assert "different sizes" in str(varlen.unsuited([replace(PLAN, value_dim=16)], half))
    assert varlen.unsuited([PLAN, PLANS["window"]], half) is None


def test_varlen_says_why_it_does_not_work_on_this_device() -> None:
    reason = varlen.works([replace(PLAN, key_dim=64, value_dim=64)], 16, torch.bfloat16, torch.device("cpu"))
    assert reason


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 20])
def test_varlen_agrees_with_the_reference_on_the_card(window: int) -> None:
    plan = replace(PLAN, key_dim=64, value_dim=64, window=window)
    reason = varlen.works([plan], 256, torch.bfloat16, torch.device("cuda"))
    assert reason is None or "varlen_attn" in reason or "page" in reason.lower(), reason
