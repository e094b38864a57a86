"""A scripted worker whose model takes as long to load as it is told: `slow_worker.py SECONDS [flags]`."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from broker.logs import Log
from examples.scripted_worker import main


def load(seconds: float) -> None:
    """Take the time, and say how far it is; SIGTERM ends it at once, as with the real one."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    log = Log("worker")
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        log.info("loading", seconds=round(passed, 1), of=seconds)
        time.sleep(0.25)


if __name__ == "__main__":
    load(float(sys.argv.pop(1)))
    main()
