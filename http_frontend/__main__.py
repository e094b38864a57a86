"""`python -m http_frontend`: read settings, wire the parts, serve, stop on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import uvloop
import zmq
import zmq.asyncio

from broker import addresses, curve, options
from broker.client import AsyncClient
from broker.lifeline import end_with_supervisor
from broker.logs import Log
from http_frontend.broker_scrape import NO_ADMIN, broker_text
from http_frontend.catalogue import REFRESH_S, Catalogue
from http_frontend.frontend import Frontend
from http_frontend.keys import KeyFileError, Keys
from http_frontend.limits import Hosts, Origins, is_loopback
from http_frontend.metrics import Siblings, merge
from http_frontend.server import Server, answers, bind
from http_frontend.settings import FrontendSettings
from http_frontend.spans import open_spans
from http_frontend.tracing import AccessLog

EXIT_USAGE: Final = options.EXIT_USAGE  # 2: a setting that can't be used
EXIT_ADDRESS: Final = 3  # the HTTP address is taken, or isn't ours
EXIT_UNSAFE: Final = 4  # others could reach us and there are no keys
EXIT_FILE: Final = 5  # a key file or a certificate can't be used
EXIT_FAULT: Final = 70  # a part of us has failed; supervisord starts us again

PROG: Final = "python -m http_frontend"
GC_THRESHOLDS: Final = (20_000, 20, 20)  # Python's own run the collector every few requests
KEYS_RELOAD_S: Final = 1.0
SPANS_S: Final = 2.0  # how long the last spans may take to be sent
FIRST_ANSWER_S: Final = 2.0  # how long we wait for a broker before we listen without one


def main(argv: list[str]) -> int:
    """Run until told to stop; returns the exit code."""
    settings = options.load(FrontendSettings, PROG, argv, os.environ)
    end_with_supervisor()
    try:
        keys = _keys(settings)
        tls = _tls(settings)
        broker_at = _address("clients", settings.clients, settings)
        admin_at = _address("admin", settings.admin, settings)
        _check_port(settings, addresses.make_run_dir(settings.run_dir))
        sock = bind(settings.host, settings.port, reuse_port=settings.reuse_port)
    except _Unsafe as problem:
        return _say(problem, EXIT_UNSAFE)
    except (KeyFileError, ssl.SSLError, _FileError) as problem:
        return _say(problem, EXIT_FILE)
    except ValueError as problem:
        return _say(problem, EXIT_USAGE)
    except OSError as problem:
        where = f"{settings.host}:{settings.port}"
        return _say(f"can't listen on {where}: {problem.strerror or problem}", EXIT_ADDRESS)
    with sock:
        return uvloop.run(_serve(settings, keys, tls, sock, broker_at, admin_at))


class _Unsafe(Exception):
    """Others could reach us and there are no keys."""


class _FileError(Exception):
    """A file can't be read."""


def _say(problem: object, code: int) -> int:
    print(f"{PROG}: {problem}", file=sys.stderr)
    return code


def _keys(settings: FrontendSettings) -> Keys | None:
    if settings.api_keys:
        keys = Keys(Path(settings.api_keys))
        keys.reload()
        return keys
    if not is_loopback(settings.host):
        raise _Unsafe(f"{settings.host} can be reached by others: it needs --api-keys")
    return None


def _address(which: str, given: str, settings: FrontendSettings) -> str:
    """Where a socket of the broker is; for ``admin`` also `NO_ADMIN`.

    Raises:
        ValueError: it can't be there, or the keys that it needs are missing.
    """
    where = addresses.address(which, given, settings.run_dir)
    if (which, where) != ("admin", NO_ADMIN):
        curve.check(where, settings.curve_keys, which)
    return where


def _check_port(settings: FrontendSettings, directory: Path) -> None:
    """A port is shared with our own kind only: two pools on it would answer each other's requests.

    Raises:
        OSError: somebody listens there who isn't a frontend of this run directory.
    """
    host, port = settings.host, settings.port
    if settings.reuse_port and port and not Siblings.known(directory, port) and answers(host, port):
        raise OSError(errno.EADDRINUSE, "another program, or another pool, has this port")


def _tls(settings: FrontendSettings) -> ssl.SSLContext | None:
    if not settings.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    except FileNotFoundError as problem:
        raise _FileError(f"{settings.tls_cert}: {problem.strerror}") from None
    return context


async def _serve(
    settings: FrontendSettings,
    keys: Keys | None,
    tls: ssl.SSLContext | None,
    sock: socket.socket,
    broker_at: str,
    admin_at: str,
) -> int:
    log = Log("frontend", level=settings.log_level)
    stop = _stop_signal()
    pool = AsyncClient(broker_at, curve_keys=settings.curve_keys)
    context = zmq.asyncio.Context()
    frontend = _wire(settings, keys, pool, log)
    host, port = sock.getsockname()[:2]
    siblings = Siblings(addresses.run_dir(settings.run_dir).absolute(), port, frontend.metrics.text)
    frontend.scrape = lambda: _scrape(frontend, context, siblings, admin_at)
    server = Server(frontend)
    await siblings.open()
    background = [_watched(stop, frontend.catalogue.run(), log)]
    # Others may share the port: we listen only once we know the models, so that no request meets a 503.
    await frontend.catalogue.wait_heard(FIRST_ANSWER_S)
    await server.start(sock, tls)
    if keys is not None:
        background.append(_watched(stop, _reload_keys(keys, log), log))
    log.info("listening", host=host, port=port, tls=tls is not None, broker=broker_at, keys=keys is not None)
    gc.collect()
    gc.freeze()  # what is here now stays: the collector needn't walk over it again and again
    gc.set_threshold(*GC_THRESHOLDS)
    code = await stop
    log.info("stopping", in_hand=frontend.metrics.in_hand)
    await server.drain(settings.drain_grace_s)
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    await siblings.close()
    pool.close()
    context.term()
    frontend.access.flush()
    frontend.spans.flush(SPANS_S)
    log.info("stopped")
    return code


def _wire(settings: FrontendSettings, keys: Keys | None, pool: AsyncClient, log: Log) -> Frontend:
    return Frontend(
        settings=settings,
        log=log,
        access=AccessLog("frontend", settings.log_level),
        pool=pool,
        catalogue=Catalogue(lambda: pool.models(REFRESH_S), time.monotonic, log),
        keys=keys,
        hosts=Hosts(settings.allowed_hosts, loopback=is_loopback(settings.host)),
        origins=Origins(settings.cors_origins),
        spans=open_spans(os.environ, log),
    )


async def _scrape(
    frontend: Frontend, context: zmq.asyncio.Context, siblings: Siblings, admin_at: str
) -> bytes:
    broker, others = await asyncio.gather(
        broker_text(context, admin_at, frontend.settings.curve_keys), siblings.ask()
    )
    return merge([frontend.metrics.text().decode(), *others, broker])


async def _reload_keys(keys: Keys, log: Log) -> None:
    while True:
        await asyncio.sleep(KEYS_RELOAD_S)
        try:
            if keys.reload():
                log.info("keys read again")
        except KeyFileError as problem:
            log.error("keys not read, the old ones stay", problem=str(problem))


def _stop_signal() -> asyncio.Future[int]:
    """Done with 0 at the first SIGTERM or SIGINT; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()

    def told() -> None:
        if stop.done():
            os._exit(0)
        stop.set_result(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    return stop


def _watched(stop: asyncio.Future[int], work: Coroutine[Any, Any, None], log: Log) -> asyncio.Task[None]:
    """Run something for ever; if it fails, we stop, and whoever watches us starts us again."""
    task = asyncio.ensure_future(work)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("a part has failed", exc=task.exception())
            if not stop.done():
                stop.set_result(EXIT_FAULT)

    task.add_done_callback(ended)
    return task


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
