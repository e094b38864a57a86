"""The broker's metrics in Prometheus' text format. Reads the scheduler; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from broker.metrics import SECONDS, Histogram
from broker.scheduler import Scheduler
from broker.status import ModelStatus, Status, WorkerStatus, status

Family = CounterMetricFamily | GaugeMetricFamily


def exposition(scheduler: Scheduler, started: float, pid: int, now: float) -> bytes:
    """All metrics of the broker and of its workers (from their beats), as one scrape's text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(scheduler, status(scheduler, started, pid, now, requests=False)))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, scheduler: Scheduler, now: Status) -> None:
        self._scheduler = scheduler
        self._status = now

    def collect(self) -> Iterator[Metric]:
        yield from self._totals()
        yield from _by_model(self._status.models)
        yield from _by_worker(self._status.workers)
        waits = self._scheduler.metrics.dispatch_wait
        yield _histogram("loadonce_broker_queue_seconds", "arrival to first worker", waits)

    def _totals(self) -> Iterator[Metric]:
        counted = self._scheduler.metrics
        for name, text, value in (
            ("submitted", "requests received", counted.submitted),
            ("done", "requests that ended well", counted.done),
            ("tokens", "tokens forwarded", counted.tokens),
            ("dispatched", "attempts begun", counted.dispatched),
            ("continuations", "attempts that went on where another stopped", counted.continuations),
            ("handoffs", "requests handed back by a worker", counted.handoffs),
            ("worker_deaths", "workers that went down", counted.worker_deaths),
            ("stray", "outputs of an attempt that was over", counted.stray),
            ("unroutable", "messages whose peer had left", counted.unroutable),
            ("malformed", "messages that could not be decoded", counted.malformed),
            ("replaced", "requests submitted again while in flight", counted.replaced),
            ("workers_refused", "registrations that were refused", counted.workers_refused),
        ):
            yield CounterMetricFamily(f"loadonce_broker_{name}", text, value=value)
        failed = CounterMetricFamily("loadonce_broker_failed", "requests that failed", labels=["code"])
        for code, count in counted.failed.items():
            failed.add_metric([code], count)
        yield failed
        yield GaugeMetricFamily("loadonce_broker_in_flight", "requests in flight", self._status.in_flight)
        yield GaugeMetricFamily("loadonce_broker_clients", "clients with requests", self._status.clients)


def _by_model(models: list[ModelStatus]) -> Iterator[Metric]:
    waiting = GaugeMetricFamily("loadonce_broker_waiting", "requests that wait", labels=["model"])
    oldest = GaugeMetricFamily("loadonce_broker_oldest_seconds", "age of the oldest", labels=["model"])
    ready = GaugeMetricFamily("loadonce_broker_workers_ready", "workers ready", labels=["model"])
    for model in models:
        waiting.add_metric([model.name], model.waiting)
        oldest.add_metric([model.name], model.oldest_s)
        ready.add_metric([model.name], model.ready)
    yield from (waiting, oldest, ready)


def _by_worker(workers: list[WorkerStatus]) -> Iterator[Metric]:
    labels = ["worker", "model"]
    gauges = ("in_hand", "slots", "kv_pages_used", "kv_pages_total")
    counters = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")
    kinds: list[tuple[type[Family], tuple[str, ...]]] = [
        (GaugeMetricFamily, gauges),
        (CounterMetricFamily, counters),
    ]
    for kind, names in kinds:
        for name in names:
            family = kind(f"loadonce_worker_{name}", f"{name.replace('_', ' ')} of a worker", labels=labels)
            for worker in workers:
                family.add_metric([worker.name, ",".join(worker.models)], getattr(worker, name))
            yield family


def _histogram(name: str, text: str, observed: Histogram) -> HistogramMetricFamily:
    buckets, total = [], 0
    for bound, count in zip([*map(str, SECONDS), "+Inf"], observed.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=observed.sum)
