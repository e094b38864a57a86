"""Spans, with OpenTelemetry's own SDK."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from broker.logs import Log
from http_frontend.spans import Spans, open_spans

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def kept() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(kept: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(kept))
    return made


def test_without_a_provider_the_callers_context_is_handed_on() -> None:
    spans = Spans()
    span, handed_on = spans.start("/x", "GET", PARENT)
    assert handed_on == PARENT
    spans.end(span, 200, "m")
    spans.flush(1.0)


def test_each_request_is_a_span_under_the_callers_and_the_worker_gets_its_id(
    kept: InMemorySpanExporter, provider: TracerProvider
) -> None:
    spans = Spans(provider)
    span, handed_on = spans.start("/v1/completions", "POST", PARENT)
    spans.end(span, 200, "m")
    [found] = kept.get_finished_spans()
    assert found.name == "POST /v1/completions"
    assert found.kind is trace.SpanKind.SERVER
    assert found.parent is not None and f"{found.parent.span_id:016x}" == "b7ad6b7169203331"
    assert handed_on == f"00-0af7651916cd43dd8448eb211c80319c-{found.context.span_id:016x}-01"
    assert dict(found.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "m",
    }
    assert found.status.status_code is trace.StatusCode.UNSET


def test_a_request_without_a_parent_begins_a_trace(provider: TracerProvider) -> None:
    span, handed_on = Spans(provider).start("/x", "GET", "")
    assert handed_on.split("-")[1] == f"{span.get_span_context().trace_id:032x}"


@pytest.mark.parametrize(("status", "error"), [(500, True), (503, True), (429, False), (499, False)])
def test_a_failure_of_ours_is_a_failed_span(
    kept: InMemorySpanExporter, provider: TracerProvider, status: int, error: bool
) -> None:
    spans = Spans(provider)
    spans.end(spans.start("/x", "GET", "")[0], status, "")
    [found] = kept.get_finished_spans()
    assert (found.status.status_code is trace.StatusCode.ERROR) is error
    assert "gen_ai.request.model" not in (found.attributes or {})


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end() -> None:
    class Stuck:
        def __init__(self) -> None:
            self.asked = threading.Event()

        def get_tracer(self, name: str) -> None:
            pass

        def force_flush(self) -> None:
            self.asked.set()
            threading.Event().wait()

    stuck = Stuck()
    began = time.monotonic()
    Spans(stuck).flush(0.05)
    assert stuck.asked.is_set()
    assert time.monotonic() - began < 5


def log() -> tuple[Log, io.StringIO]:
    stream = io.StringIO()
    return Log("frontend", stream=stream), stream


def test_nothing_is_exported_unless_the_environment_says_where_to() -> None:
    logged, stream = log()
    assert open_spans({}, logged).start("/x", "GET", PARENT) == (None, PARENT)
    assert stream.getvalue() == ""


def test_an_endpoint_without_the_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    logged, stream = log()
    spans = open_spans({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, logged)
    assert spans.start("/x", "GET", PARENT) == (None, PARENT)
    line: dict[str, Any] = json.loads(stream.getvalue())
    assert line["level"] == "warning" and "loadonce[otel]" in line["event"]


def test_the_provider_of_a_launcher_is_used(
    monkeypatch: pytest.MonkeyPatch, kept: InMemorySpanExporter, provider: TracerProvider
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    spans = open_spans({}, log()[0])
    spans.end(spans.start("/x", "GET", "")[0], 200, "")
    assert len(kept.get_finished_spans()) == 1
