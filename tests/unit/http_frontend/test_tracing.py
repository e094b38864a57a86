"""Ids, trace context, the access log, spans."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from http_frontend.tracing import AccessLog, RequestIds, traceparent


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
