"""A frontend's spans arrive at a collector, and a worker's log names the same trace."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.integration.http_serving import HttpPool, free_port
from tests.pool import Pool, wait_for

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Collector:
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.taken.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.taken: list[tuple[str, ExportTraceServiceRequest]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def test_a_request_is_one_trace_from_the_caller_to_the_worker(pool: Pool, tiny: Path) -> None:
    collector = Collector()
    pool.environment |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    }
    try:
        pool.broker()
        pool.start("gpu0", "-m", "gpu_worker", "--model", str(tiny), "--device", "cpu", "--no-compile")
        served = HttpPool(pool, free_port())
        served.frontend()
        served.wait_ready()
        status, _ = served.post(
            "/v1/completions", {"model": tiny.name, "prompt": "hi", "max_tokens": 2}, traceparent=PARENT
        )
        assert status == 200
        assert pool.stop("http") == 0, "what it has is sent when it stops"
    finally:
        collector.close()

    [(path, sent)] = [one for one in collector.taken if TRACE in _traces(one[1])]
    assert path == "/v1/traces"
    [resource] = sent.resource_spans
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "loadonce"
    span = next(s for scope in resource.scope_spans for s in scope.spans if s.trace_id.hex() == TRACE)
    assert span.name == "POST /v1/completions"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    wait_for(lambda: f"00-{TRACE}-{span.span_id.hex()}-01" in pool.log("gpu0"), "the worker's line")


def _traces(sent: ExportTraceServiceRequest) -> set[str]:
    return {
        span.trace_id.hex()
        for resource in sent.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
