"""Wires a worker's parts: device, model, engine thread, link. Decides nothing about requests."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any, Final

import torch

from broker import protocol as p
from broker.addresses import address
from broker.logs import Log

from . import devices
from .engine import Engine
from .exchange import EngineDied, Run, StepOutput
from .intake import describe_defaults
from .link import Link, Outbox
from .loading import LoadedModel, load
from .runner import Runner
from .session import End, Session
from .settings import WorkerSettings
from .support import NotPaged
from .watchdog import Watchdog
from .whole import WholeRunner, settings_for_one

WARM_UP_ID: Final = "warm-up"
JOIN_S: Final = 3.0


class WarmUpFailed(Exception):
    """No token came out of the engine; the worker must not register."""


def serve(settings: WorkerSettings, claim: devices.Claim, name: str, log: Log) -> tuple[End, bool]:
    """Load, warm up, register and serve until the session ends.

    Returns:
        Why it ended, and whether the engine's thread is still inside a step, so that the interpreter would
        never end either.

    Raises:
        LoadError: the model can't be loaded.
        WarmUpFailed: it was loaded, and no token came out.
        MemoryError: there is no room for a KV cache.
    """
    device = torch.device(claim.torch_name)
    _prepare(settings, claim, log)
    loaded = load(settings, device, log)
    log.info("defaults", rule=describe_defaults(loaded.defaults))
    outbox = Outbox()
    engine, slots = _engine(loaded, settings, outbox, log)
    thread = threading.Thread(target=engine.run, name="engine", daemon=True)
    thread.start()
    _warm_up(engine, outbox, settings.step_timeout_s)
    now = time.monotonic()
    ready = _ready(loaded, engine.context, claim, name, slots, settings)
    session = Session(ready, engine.counters, log, now)
    watchdog = Watchdog(engine.counters, settings.step_timeout_s, now)
    where = address("workers", settings.workers, settings.run_dir)
    link = Link(where, settings.curve_keys, session, engine.inbox, outbox, watchdog, log)
    _obey_signals(link, settings.drain_grace_s)
    link.run()
    thread.join(JOIN_S)
    assert session.end is not None, "the link returned before the session's end"
    log.info("stopped", why=session.end.value)
    return session.end, thread.is_alive()


def _prepare(settings: WorkerSettings, claim: devices.Claim, log: Log) -> None:
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    if claim.indices and not settings.share_device:
        devices.wait_for_memory(
            lambda: devices.least_free(claim.indices, torch.cuda.mem_get_info),
            settings.memory_fraction, settings.memory_wait_s, log,
        )  # fmt: skip


def _engine(loaded: LoadedModel, settings: WorkerSettings, outbox: Outbox, log: Log) -> tuple[Engine, int]:
    """The engine for this model, and how many requests it takes at a time."""
    runner: Any
    try:
        if "," in settings.device:
            raise NotPaged("it is spread over several devices")
        runner = Runner(loaded, settings, log)
    except NotPaged as reason:
        log.warning("not paged", reason=str(reason), effect="one request at a time")
        settings = settings_for_one(settings, loaded.context)
        runner = WholeRunner(loaded, log)
    runner.warm_up()
    runner.start_compile()
    return Engine(loaded, settings, runner, outbox.put, log), settings.slots


def _warm_up(engine: Engine, outbox: Outbox, patience_s: float) -> None:
    """Send one small request through the engine and wait for its token."""
    request = p.Request(token_ids=[0], params=p.Params(max_tokens=1, temperature=0, ignore_eos=True))
    engine.inbox.put(Run(WARM_UP_ID, WARM_UP_ID, p.encode(request)))
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        for output in outbox.take():
            if isinstance(output, EngineDied):
                raise WarmUpFailed(output.reason)
            if _has_ended(output):
                return
        time.sleep(0.01)
    raise WarmUpFailed(f"no token within {patience_s:g} s")


def _has_ended(output: StepOutput) -> bool:
    for _, problem in output.failed:
        raise WarmUpFailed(problem.message)
    return any(id == WARM_UP_ID for id, _ in output.finished)


def _ready(
    loaded: LoadedModel, context: int, claim: devices.Claim, name: str, slots: int, settings: WorkerSettings
) -> p.Ready:
    info = p.ModelInfo(
        name=loaded.name, context=context, vocab=loaded.vocab, aliases=list(loaded.aliases),
        chat=bool(loaded.tokenizer.chat_template), dtype=str(loaded.dtype).removeprefix("torch."),
        quantization=loaded.quantization, created=int(time.time()),
    )  # fmt: skip
    return p.Ready(
        name=name, device=claim.torch_name, host=socket.gethostname(), pid=os.getpid(), slots=slots,
        models=[info], device_uuid=claim.uuid, shared_device=settings.share_device,
    )  # fmt: skip


def _obey_signals(link: Link, grace_s: float) -> None:
    """The first SIGTERM or SIGINT drains within the grace, the second at once."""
    asked: list[int] = []

    def drain(number: int, _: object) -> None:
        link.request_drain(0.0 if asked else grace_s)
        asked.append(number)

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
