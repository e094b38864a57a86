"""What every route may use: settings, the pool, the catalogue, counters. Made once, in `__main__`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from broker.calls import make_submit
from broker.errors import Overloaded
from broker.logs import Log
from broker.protocol import ModelInfo
from http_frontend.catalogue import Catalogue
from http_frontend.incoming import Incoming
from http_frontend.jobs import Job, Pool
from http_frontend.keys import Keys
from http_frontend.limits import Hosts, Origins, Rates
from http_frontend.metrics import Metrics
from http_frontend.settings import FrontendSettings
from http_frontend.spans import Spans
from http_frontend.sse import EventStream
from http_frontend.tracing import AccessLog, RequestIds
from http_frontend.validate import Ask


@dataclass(kw_only=True)
class Frontend:
    """The parts of one frontend, and the few things that routes do with more than one of them."""

    settings: FrontendSettings
    log: Log
    access: AccessLog
    pool: Pool
    catalogue: Catalogue
    keys: Keys | None
    hosts: Hosts
    origins: Origins
    clock: Callable[[], float] = time.monotonic
    metrics: Metrics = field(default_factory=Metrics)
    rates: Rates = field(default_factory=Rates)
    ids: RequestIds = field(default_factory=RequestIds)
    spans: Spans = field(default_factory=Spans)
    scrape: Callable[[], Awaitable[bytes]] = field(init=False)  # set by who knows broker and siblings
    draining: bool = False

    async def body(self, request: Incoming) -> bytes:
        """The request's body, within the limits."""
        return await request.body(self.settings.max_body_bytes, self.settings.body_timeout_s)

    def start(
        self, request: Incoming, model: ModelInfo, ask: Ask, *, stream: bool, priority: int | None = None
    ) -> Job:
        """Submit what was asked for; the caller closes the job.

        Raises:
            HttpError: the key's rate is used up.
            LoadOnceError: the pool refuses at once.
        """
        caller = request.caller
        request.model = model.name
        request.extra += self.rates.take(caller, self.clock())
        if self.metrics.in_hand > self.settings.max_requests:
            raise Overloaded("This frontend has as many requests as it may.", retry_after_ms=1000)
        asked = []
        for one in ask.requests:
            one.traceparent = request.traceparent
            submit = make_submit(
                one,
                id=self.ids.for_pool(request.request_id),
                model=model.name,
                stream=stream,
                tenant=caller.tenant,
                priority=max(caller.priority, caller.priority if priority is None else priority),
            )
            asked.append((submit, one))
        job = Job(self.pool, self.clock, self.metrics.models[model.name])
        try:
            job.start(asked, self.settings.deadline_s)
        except BaseException:
            job.close()
            raise
        return job

    def close(self, request: Incoming, job: Job) -> None:
        """Cancel what still runs of a job, and count what it used."""
        job.close()
        self.rates.spend(request.caller, job.tokens, self.clock())

    def open_stream(self, request: Incoming) -> EventStream:
        """Send the headers of an event stream."""
        return EventStream(
            request,
            buffer_bytes=self.settings.stream_buffer_bytes,
            heartbeat_s=self.settings.heartbeat_s,
            extra=request.extra,
        )
