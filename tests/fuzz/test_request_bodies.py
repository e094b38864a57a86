"""Whatever bytes come as a request or as its chunks: a sequence, an answer, or a documented error."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker import protocol
from broker.errors import InvalidRequest
from gpu_worker.exchange import Run
from gpu_worker.intake import Answer, Intake
from gpu_worker.sequence import Sequence
from tests.unit.gpu_worker.fakes import CONTEXT, VOCAB, loaded

INTAKE = Intake(loaded(), CONTEXT)

integers = st.integers(-(2**63), 2**64 - 1) | st.integers(-3, VOCAB + 3)
scalars = st.none() | st.booleans() | integers | st.floats() | st.text(max_size=20) | st.binary(max_size=8)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ids = st.lists(st.integers(-1, VOCAB), max_size=12)
grammars = st.fixed_dictionaries(
    {"kind": st.sampled_from(["json_schema", "json_object", "regex", "lark", "bnf"])},
    optional={"value": st.text(max_size=30) | st.sampled_from(['{"type":"object"}', "[a-z]+", 'start: "a"'])},
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(-1, CONTEXT + 1),
    "min_tokens": st.integers(0, 9),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, VOCAB + 1),
    "top_p": st.floats(0, 1),
    "logit_bias": st.lists(st.tuples(st.integers(-1, VOCAB), st.floats(-100, 100)), max_size=4),
    "stop": st.lists(st.text(max_size=5), max_size=3),
    "stop_token_ids": ids,
    "grammar": grammars,
    "echo": st.booleans(),
    "prompt_logprobs": st.integers(0, 3),
    "seed": integers,
}


def some_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A map with some of the fields, and often one of them with a value of any shape."""
    right = st.fixed_dictionaries({}, optional=fields)
    odd = st.dictionaries(st.sampled_from([*fields, "unknown"]), trees, max_size=1)
    return st.tuples(right, odd).map(lambda both: both[0] | both[1])


def with_one(request: dict[str, Any], source: tuple[str, Any]) -> dict[str, Any]:
    return request | {source[0]: source[1]}


params = some_of(likely)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", ""])}, optional={"content": st.text(max_size=20)}
    ),
    max_size=3,
)
sources = st.one_of(
    st.tuples(st.just("prompt"), st.text(max_size=40)),
    st.tuples(st.just("token_ids"), ids),
    st.tuples(st.just("messages"), messages),
)
requests = st.builds(
    with_one,
    some_of(
        {
            "params": params,
            "task": st.sampled_from(["generate", "generate", "tokenize", "detokenize"]),
            "tools": st.just([]),
            "add_generation_prompt": st.booleans(),
        }
    ),
    sources,
)
chunks = some_of({"start": st.integers(0, 3), "token_ids": ids, "text": st.text(max_size=5)})


def feed(request: bytes, *delivered: bytes) -> None:
    try:
        accepted = INTAKE.accept(Run("1", "client", request, delivered))
    except InvalidRequest as problem:
        assert problem.message
        return
    assert isinstance(accepted, Sequence | Answer)
    if isinstance(accepted, Sequence):
        assert accepted.prompt_tokens >= 1
        assert accepted.most_tokens <= CONTEXT
        assert all(0 <= id < VOCAB for id in accepted.token_ids)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=50), max_size=2))
def test_any_bytes(request: bytes, delivered: list[bytes]) -> None:
    feed(request, *delivered)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests)
def test_any_request_of_roughly_the_right_shape(request: dict[str, Any]) -> None:
    feed(protocol.encode(request))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some_of(likely), st.lists(chunks, min_size=1, max_size=3))
def test_any_chunks_of_roughly_the_right_shape(
    params: dict[str, Any], delivered: list[dict[str, Any]]
) -> None:
    request = protocol.encode({"prompt": "hello", "params": params})
    feed(request, *(protocol.encode(chunk) for chunk in delivered))
