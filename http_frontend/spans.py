"""OpenTelemetry: each request is a span, the worker's log line carries the span's context on.

Only where OTEL_EXPORTER_OTLP_ENDPOINT says where spans go and the extra ``loadonce[otel]`` is installed, or
where the operator's own launcher (``opentelemetry-instrument``) has set a tracer provider. The names of the
attributes are OpenTelemetry's semantic conventions for HTTP servers and generative AI.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

from broker.logs import Log

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE: Final = "loadonce"  # unless OTEL_SERVICE_NAME says otherwise


class Spans:
    """Makes spans with a tracer provider; without one, nothing but to hand on the caller's context.

    Args:
        provider: an ``opentelemetry.trace.TracerProvider``.
    """

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer: Any = None
        if provider is not None:
            from opentelemetry import propagate, trace

            self._trace, self._propagate = trace, propagate
            self._tracer = provider.get_tracer("loadonce.http_frontend")

    def start(self, route: str, method: str, parent: str) -> tuple[Any, str]:
        """Begin a span under the caller's `traceparent`; returns it, if there is one, and what to hand on."""
        if self._tracer is None:
            return None, parent
        context = self._propagate.extract({"traceparent": parent} if parent else {})
        span = self._tracer.start_span(
            f"{method} {route}",
            context=context,
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route},
        )
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier, context=self._trace.set_span_in_context(span, context))
        return span, carrier.get("traceparent", parent)

    def end(self, span: Any, status: int, model: str) -> None:
        """End it."""
        if span is None:
            return
        span.set_attribute("http.response.status_code", status)
        if model:
            span.set_attribute("gen_ai.request.model", model)
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()

    def flush(self, timeout_s: float) -> None:
        """Send what is noted; a collector that doesn't answer in time costs the rest."""
        send = getattr(self._provider, "force_flush", None)
        if send is not None:
            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            thread.join(timeout_s)


def open_spans(environment: Mapping[str, str], log: Log) -> Spans:
    """As the environment says; what is asked for and can't be had is logged."""
    trace = sys.modules.get("opentelemetry.trace")  # a launcher has loaded it
    if trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return Spans(trace.get_tracer_provider())
    endpoint = next((environment[name] for name in ENDPOINTS if environment.get(name)), "")
    if not endpoint:
        return Spans()
    try:
        provider = _provider()
    except ImportError as problem:
        log.warning("no spans: loadonce[otel] isn't installed", endpoint=endpoint, reason=str(problem))
        return Spans()
    log.info("spans", endpoint=endpoint)
    return Spans(provider)


def _provider() -> Any:
    """One that sends batches over OTLP; its exporter reads the rest of the OTEL_* variables itself."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE}
    # We flush at the end ourselves, with a limit of time.
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
