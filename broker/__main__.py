"""`python -m broker`: reads the settings, wires the parts, runs until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from typing import Final

import zmq

from broker.addresses import address, make_run_dir
from broker.admin_server import AdminServer
from broker.logs import Log
from broker.options import load
from broker.scheduler import Scheduler
from broker.settings import BrokerSettings
from broker.sockets import Sockets

EXIT_CANNOT_LISTEN: Final = 3
PROG: Final = "python -m broker"


def main(argv: list[str]) -> int:
    """Run the broker; returns the exit code."""
    settings = load(BrokerSettings, PROG, argv, os.environ)
    log = Log("broker", level=settings.log_level)
    started = time.monotonic()
    scheduler = Scheduler(settings, secrets.token_hex(8), started, log)
    try:
        make_run_dir(settings.run_dir)
        addresses = {
            which: address(which, getattr(settings, which), settings.run_dir)
            for which in ("clients", "workers", "admin")
        }
        admin = AdminServer(scheduler, started)
        sockets = Sockets(addresses, scheduler, admin.answer, settings.curve_keys, log)
        sockets.bind()
    except (OSError, ValueError, zmq.ZMQError) as problem:
        print(f"{PROG}: {problem}", file=sys.stderr)
        return EXIT_CANNOT_LISTEN
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sockets.stop())
    log.info("broker_listens", session=scheduler.session, **addresses)
    sockets.run()
    sockets.close()
    log.info("broker_stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
