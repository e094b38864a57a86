"""Ids, trace context, the access log, spans."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from http_frontend.tracing import AccessLog, RequestIds, Spans, traceparent


def test_ids_differ() -> None:
    ids, others = RequestIds(), RequestIds()
    assert len({ids.new() for _ in range(100)} | {others.new() for _ in range(100)}) == 200


def test_an_id_for_the_pool_fits_the_protocol() -> None:
    made = RequestIds().for_pool("x" * 64)
    assert len(made) <= 55
    assert made.startswith("x" * 40)


GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        GOOD + "x",
        GOOD.upper(),
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        "ff" + GOOD[2:],
        GOOD + "\n",
    ],
)
def test_a_trace_context_that_isnt_one_is_dropped(bad: str | None) -> None:
    assert traceparent(bad) == ""
    assert traceparent(GOOD) == GOOD


async def test_lines_are_written_in_batches_and_at_the_end() -> None:
    out = io.StringIO()
    log = AccessLog("frontend", "info", out)
    log.write({"path": "/a"})
    log.write({"path": "\u2028\u0085é"})
    assert out.getvalue() == ""
    log.flush()
    lines = out.getvalue().splitlines()
    assert [json.loads(line)["path"] for line in lines] == ["/a", "\u2028\u0085é"]
    assert out.getvalue().isascii()
    log.write({"path": "/c"})
    async with asyncio.timeout(5):
        while "/c" not in out.getvalue():
            await asyncio.sleep(0.01)


async def test_above_info_nothing_is_written() -> None:
    out = io.StringIO()
    log = AccessLog("frontend", "warning", out)
    log.write({"path": "/a"})
    log.flush()
    assert out.getvalue() == ""


def test_without_opentelemetry_the_callers_context_is_handed_on() -> None:
    spans = Spans()
    if spans.installed:
        pytest.skip("opentelemetry is installed here")
    span, parent = spans.start("/x", "GET", GOOD)
    assert parent == GOOD
    spans.end(span, 200, "m")


class FakeSpan:
    """What the package's spans can do, as far as we use it."""

    def __init__(self, name: str, context: Any) -> None:
        self.name, self.context = name, context
        self.attributes: dict[str, Any] = {}
        self.ended = False

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def end(self) -> None:
        self.ended = True


def test_with_opentelemetry_each_request_is_a_span_and_the_worker_its_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracer = SimpleNamespace(start_span=lambda name, context: FakeSpan(name, context))
    trace = SimpleNamespace(
        get_tracer=lambda name: tracer, set_span_in_context=lambda span, context: (span, context)
    )
    child = GOOD.replace("b7ad6b7169203331", "00f067aa0ba902b7")
    propagate = SimpleNamespace(
        extract=lambda carrier: dict(carrier),
        inject=lambda carrier, context: carrier.update(traceparent=child),
    )
    monkeypatch.setitem(sys.modules, "opentelemetry", SimpleNamespace(trace=trace, propagate=propagate))
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)
    monkeypatch.setitem(sys.modules, "opentelemetry.propagate", propagate)
    spans = Spans()
    assert spans.installed
    span, parent = spans.start("/v1/completions", "POST", GOOD)
    assert parent == child
    assert span.name == "POST /v1/completions"
    assert span.context == {"traceparent": GOOD}
    spans.end(span, 200, "m")
    assert span.ended
    assert span.attributes == {"http.response.status_code": 200, "gen_ai.request.model": "m"}
