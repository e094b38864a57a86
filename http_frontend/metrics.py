"""What is counted here, and one scrape of everything: our siblings on the port, the broker, its workers.

Counting is plain arithmetic on our own objects; prometheus-client comes in at a scrape only. Each frontend
tells its numbers to the others through a socket in the run directory, under its own ``frontend`` label.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SCRAPE_TIMEOUT_S: Final = 2.0
MAX_SCRAPE_BYTES: Final = 4 * 1024 * 1024

SHORT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LONG_S: Final = (
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)


class Histogram:
    """Counts of values below bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts for each bound, and the sum, as prometheus-client wants them."""
        total, found = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found, self._sum


class ModelMetrics:
    """What is counted for each model."""

    def __init__(self) -> None:
        self.first_token = Histogram(SHORT_S)
        self.per_token = Histogram(SHORT_S)
        self.latency = Histogram(LONG_S)
        self.queued = Histogram(LONG_S)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.finished: dict[str, int] = defaultdict(int)  # by finish reason

    def done(self, *, seconds: float, first_s: float | None, queued_s: float, tokens: int) -> None:
        """One request of the pool ended well.

        Args:
            seconds: from submit to the end.
            first_s: from submit to the first output; None if it didn't stream.
            queued_s: in the broker.
            tokens: that it made.
        """
        self.latency.observe(seconds)
        self.queued.observe(queued_s)
        if first_s is None:
            return
        self.first_token.observe(first_s)
        if tokens > 1:
            self.per_token.observe((seconds - first_s) / (tokens - 1))


class Metrics(Collector):
    """Everything that this frontend counts."""

    def __init__(self) -> None:
        self.name = str(os.getpid())
        self.models: dict[str, ModelMetrics] = defaultdict(ModelMetrics)
        self.requests: dict[tuple[str, int], int] = defaultdict(int)  # by route and status
        self.errors: dict[str, int] = defaultdict(int)  # by code
        self.in_hand = 0
        self.streams = 0
        self.connections: Callable[[], int] = lambda: 0
        self.slow_readers = 0
        self.disconnects = 0

    def text(self) -> bytes:
        """Our own numbers alone."""
        registry = CollectorRegistry()
        registry.register(self)
        return bytes(generate_latest(registry))

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: families are made at the scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The families of the text format."""
        me = self.name
        yield _counter("http_requests", "HTTP requests answered.", ("route", "status"), me, self._by_route())
        yield _counter("errors", "Errors told to callers.", ("code",), me, _keyed(self.errors))
        yield _counter("slow_readers", "Streams dropped unread.", (), me, [((), self.slow_readers)])
        yield _counter("disconnects", "Clients that went away early.", (), me, [((), self.disconnects)])
        yield _gauge("http_requests_in_hand", "Requests not yet answered.", me, self.in_hand)
        yield _gauge("http_streams", "Event streams open.", me, self.streams)
        yield _gauge("http_connections", "Connections open.", me, self.connections())
        yield from self._of_models()

    def _by_route(self) -> list[tuple[tuple[str, ...], float]]:
        return [((route, str(status)), count) for (route, status), count in self.requests.items()]

    def _of_models(self) -> Iterator[Metric]:
        me, models = self.name, self.models
        for name, text, field in (
            ("prompt_tokens", "Prompt tokens of answered requests.", "prompt_tokens"),
            ("cached_prompt_tokens", "Of these, from the prefix cache.", "cached_tokens"),
            ("generation_tokens", "Tokens generated for answered requests.", "generated_tokens"),
        ):
            yield _counter(
                name, text, ("model",), me, [((m,), getattr(of, field)) for m, of in models.items()]
            )
        ends = [((m, why), n) for m, of in models.items() for why, n in of.finished.items()]
        yield _counter("request_success", "Requests ended well.", ("model", "finished_reason"), me, ends)
        for name, text, field in (
            ("time_to_first_token", "Submit to first output.", "first_token"),
            ("time_per_output_token", "Between tokens after the first.", "per_token"),
            ("e2e_request_latency", "Submit to end.", "latency"),
            ("request_queue_time", "Waiting in the broker.", "queued"),
        ):
            family = HistogramMetricFamily(f"loadonce_{name}_seconds", text, labels=("frontend", "model"))
            for model, of in models.items():
                buckets, total = getattr(of, field).buckets()
                family.add_metric((me, model), buckets, total)
            yield family


def _keyed(counts: dict[str, int]) -> list[tuple[tuple[str, ...], float]]:
    return [((key,), float(count)) for key, count in counts.items()]


def _counter(
    name: str, text: str, labels: Sequence[str], me: str, values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = CounterMetricFamily(f"loadonce_{name}", text, labels=("frontend", *labels))
    for key, value in values:
        family.add_metric((me, *key), value)
    return family


def _gauge(name: str, text: str, me: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"loadonce_{name}", text, labels=("frontend",))
    family.add_metric((me,), value)
    return family


# ── one scrape ───────────────────────────────────────────────────────────────────────────────────


class _Merged(Collector):
    def __init__(self, texts: Iterable[str]) -> None:
        self._families: dict[str, Metric] = {}
        for text in texts:
            for family in text_string_to_metric_families(text):
                known = self._families.setdefault(family.name, family)
                if known is not family and known.type == family.type:
                    known.samples.extend(family.samples)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def merge(texts: Iterable[str]) -> bytes:
    """Several scrapes as one: families of one name stand together, under one HELP and TYPE."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class Siblings:
    """The other frontends of this run directory, each at a socket that says its numbers to who connects.

    Args:
        directory: the run directory.
        port: of this frontend.
        mine: gives this frontend's text.
    """

    def __init__(self, directory: Path, port: int, mine: Callable[[], bytes]) -> None:
        self._directory = directory
        self._path = directory / f"frontend-{port}-{os.getpid()}"
        self._mine = mine
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Answer the others."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, self._path)

    async def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._path.unlink(missing_ok=True)

    @staticmethod
    def known(directory: Path, port: int) -> bool:
        """Whether a frontend of this run directory has, or had, that port."""
        return any(directory.glob(f"frontend-{port}-*"))

    async def ask(self) -> list[str]:
        """What the others say; those that don't answer in time are left out."""
        others = [path for path in self._directory.glob("frontend-*") if path != self._path]
        return [text for text in await asyncio.gather(*map(_ask, others)) if text]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self._mine())
            await writer.drain()
        except ConnectionError:
            pass  # whoever asked has gone
        finally:
            writer.close()


async def _ask(path: Path) -> str:
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return await _read_all(reader)
            finally:
                writer.close()
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # its frontend was killed
        return ""
    except (OSError, TimeoutError, UnicodeDecodeError):
        return ""


async def _read_all(reader: asyncio.StreamReader) -> str:
    parts, size = [], 0
    while (part := await reader.read(65536)) and size <= MAX_SCRAPE_BYTES:
        parts.append(part)
        size += len(part)
    return b"".join(parts).decode()
