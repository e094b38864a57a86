"""Counting, and one scrape of several processes."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from http_frontend.metrics import Histogram, Metrics, Siblings, merge
from tests.unit.http_frontend.serving import CHAT, serving


def samples(text: str, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    assert histogram.buckets() == ([("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)], 10.0)


def test_frontends_and_broker_stand_in_one_scrape() -> None:
    first, second = Metrics(), Metrics()
    first.name, second.name = "1", "2"
    first.requests["/health", 200] = 3
    second.requests["/health", 200] = 4
    broker = "# HELP loadonce_waiting Waiting.\n# TYPE loadonce_waiting gauge\nloadonce_waiting 7.0\n"
    text = merge([first.text().decode(), second.text().decode(), broker]).decode()
    found = samples(text, "loadonce_http_requests_total")
    assert sorted(found.values()) == [3.0, 4.0]
    assert samples(text, "loadonce_waiting") == {(): 7.0}
    assert text.count("# TYPE loadonce_http_requests_total counter") == 1


async def test_a_request_is_counted_under_the_fields_usual_names() -> None:
    async with serving() as served:
        await served.chat()
        await served.events(CHAT)
        _, text, headers = await served.get("/metrics")
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        for name in (
            "time_to_first_token_seconds_count",
            "e2e_request_latency_seconds_count",
            "request_queue_time_seconds_count",
            "prompt_tokens_total",
            "generation_tokens_total",
            "request_success_total",
        ):
            (value,) = samples(text, f"loadonce_{name}").values()
            assert value > 0, name
        await served.chat(temperature=7)
        _, text, _ = await served.get("/metrics")
        codes = {dict(k)["code"] for k in samples(text, "loadonce_errors_total")}
        assert codes == {"invalid_request"}


async def test_siblings_are_found_and_the_dead_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Siblings(tmp_path, 1, lambda: b"live")
    await live.open()
    (tmp_path / f"frontend-{live_pid(tmp_path)}").rename(tmp_path / "frontend-other")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "frontend-dead"))
    dead.close()
    mine = Siblings(tmp_path, 2, lambda: b"mine")
    await mine.open()
    assert Siblings.known(tmp_path, 2)
    assert not Siblings.known(tmp_path, 3)
    assert await mine.ask() == ["live"]
    assert not (tmp_path / "frontend-dead").exists()
    await asyncio.gather(mine.close(), live.close())


def live_pid(directory: Path) -> str:
    (path,) = directory.glob("frontend-*")
    return path.name.removeprefix("frontend-")
