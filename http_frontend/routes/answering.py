"""What chat completions and completions have in common: run a job, answer whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from broker.protocol import ModelInfo
from http_frontend.errors import answer_to
from http_frontend.frontend import Frontend
from http_frontend.incoming import Incoming
from http_frontend.jobs import Formatter, Job, Result
from http_frontend.openai_types import Generation
from http_frontend.replies import Reply
from http_frontend.sse import SlowReader
from http_frontend.validate import Ask

encode = msgspec.json.Encoder().encode


async def answer(
    frontend: Frontend,
    request: Incoming,
    body: Generation,
    model: ModelInfo,
    ask: Ask,
    *,
    whole: Callable[[Sequence[Result]], msgspec.Struct],
    streamed: Callable[[], Formatter],
) -> web.StreamResponse:
    """Run what was asked for.

    Args:
        frontend: runs it.
        request: who asked.
        body: what they sent.
        model: that answers.
        ask: the pool's requests.
        whole: makes the answer of all results.
        streamed: makes the formatter of a stream.
    """
    request.user = body.user or ""
    stream = bool(body.stream)
    job = frontend.start(request, model, ask, stream=stream, priority=body.priority)
    try:
        if not stream:
            return Reply(encode(whole(await job.results())))
        await job.first()
        return await _stream(frontend, request, job, streamed())
    finally:
        frontend.close(request, job)


async def _stream(
    frontend: Frontend, request: Incoming, job: Job, formatter: Formatter
) -> web.StreamResponse:
    events = frontend.open_stream(request)
    frontend.metrics.streams += 1
    try:
        await job.stream(events, formatter)
    finally:  # cutting a slow reader's connection cancels this handler too
        frontend.metrics.streams -= 1
        if job.problem is not None:
            _note(frontend, request, job.problem)
    return events


def _note(frontend: Frontend, request: Incoming, problem: Exception) -> None:
    """The status was sent before it went wrong: only log and counters can still say so."""
    if isinstance(problem, SlowReader):
        request.outcome = f"slow reader: {problem}"
        frontend.metrics.slow_readers += 1
        frontend.log.warning("slow reader dropped", request_id=request.request_id, reason=str(problem))
        return
    said = answer_to(problem)
    request.outcome = f"broken off: {said.error.code}"
    frontend.metrics.errors[said.error.code or said.error.type] += 1
    if said.status == 500:
        frontend.log.error("a stream broke off", exc=problem, request_id=request.request_id)
