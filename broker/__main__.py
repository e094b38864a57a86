"""`python -m broker`: reads the settings, wires the parts, runs until SIGTERM or SIGINT."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import socket
import sys
import time
from typing import Final

from broker.addresses import address, make_run_dir
from broker.admin_server import AdminServer
from broker.lifeline import end_with_supervisor
from broker.logs import Log
from broker.options import load
from broker.scheduler import Scheduler
from broker.settings import BrokerSettings
from broker.sockets import Sockets

EXIT_CANNOT_LISTEN: Final = 3
PROG: Final = "python -m broker"
#: Containers made and not yet freed before Python looks for cycles. We make none of our own on the way of a
#: request, and a long queue of requests is expensive to walk through again and again.
GC_THRESHOLD: Final = 10_000


def main(argv: list[str]) -> int:
    """Run the broker; returns the exit code."""
    settings = load(BrokerSettings, PROG, argv, os.environ)
    end_with_supervisor()
    log = Log("broker", level=settings.log_level)
    started = time.monotonic()
    scheduler = Scheduler(settings, secrets.token_hex(8), started, log)
    try:
        make_run_dir(settings.run_dir)
        addresses = {
            which: address(which, getattr(settings, which), settings.run_dir)
            for which in ("clients", "workers", "admin")
        }
        admin = AdminServer(scheduler, started, socket.gethostname(), os.getpid())
        sockets = Sockets(addresses, scheduler, admin.answer, settings.curve_keys, log)
    except (OSError, ValueError) as problem:
        return _refuse(problem)
    try:
        sockets.bind()
    except (OSError, ValueError) as problem:
        sockets.close()
        return _refuse(problem)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sockets.stop())
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    log.info("broker_listens", session=scheduler.session, **addresses)
    sockets.run()
    sockets.close()
    log.info("broker_stopped")
    return 0


def _refuse(problem: Exception) -> int:
    print(f"{PROG}: {problem}", file=sys.stderr)
    return EXIT_CANNOT_LISTEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
