"""A pool under 60 % load with cancels and a kill a minute, and whether anything grows.

    python -m tests.system.soak --minutes 30        (`make soak`)

The tests run one minute of it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import msgspec

from broker.client import AsyncClient
from broker.errors import LoadOnceError
from tests.history import History
from tests.load import Ask, Load, scripted_mix
from tests.pool import wait_for
from tests.system.supervised import Supervised, supervised

SLOTS, STEPS_PER_S, WORKERS = 8, 100, 2
MEAN_TOKENS = 62.5  # of tests.load.scripted_mix
CAPACITY = WORKERS * SLOTS * STEPS_PER_S / MEAN_TOKENS  # requests per second
SHARE = 0.6
LOOK_S = 2.0
MIB = 1024 * 1024


def mix(number: int) -> Ask:
    """The mixed load, each tenth request cancelled by its client along the way."""
    ask = scripted_mix(number)
    give_up = number % 10 == 0 and ask.stream
    return Ask(**{**vars(ask), "cancel_after": random.Random(number).randint(1, 4) if give_up else None})


@dataclass
class Seen:
    """What a process held, look by look: MiB resident and descriptors."""

    resident: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self, pid: int) -> None:
        """Take another sample."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        self.resident.append(pages * os.sysconf("SC_PAGE_SIZE") / MIB)
        self.descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))

    @property
    def grown_mib(self) -> float:
        """The last quarter's mean less the second quarter's, when caches have their size."""
        return _mean(self.resident, 3) - _mean(self.resident, 1)

    @property
    def grown_descriptors(self) -> float:
        """As `grown_mib`."""
        return _mean(self.descriptors, 3) - _mean(self.descriptors, 1)


class Report(msgspec.Struct):
    """What came of it."""

    requests: int
    faults: list[str]
    kills: int
    longest_pause_s: float
    broker_grown_mib: float
    broker_grown_descriptors: float
    left_in_flight: int


def _mean(values: list[float] | list[int], quarter: int) -> float:
    size = len(values) // 4
    part = values[quarter * size : (quarter + 1) * size]
    return sum(part) / len(part) if part else 0.0


async def soak(place: Supervised, seconds: float, kill_every_s: float = 60.0) -> Report:
    """Run the load; the pool is ready."""
    history, broker, kills = History(), Seen(), 0
    async with AsyncClient(place.clients) as client:
        await client.wait_ready()
        load = Load(client, history, mix)
        running = asyncio.ensure_future(load.at_rate(SHARE * CAPACITY, seconds))
        victims = cycle([f"worker{number}" for number in range(WORKERS)])
        began = time.monotonic()
        next_kill = began + kill_every_s / 2
        pid = (await asyncio.to_thread(place.status)).pid
        while not running.done():
            await asyncio.wait([running], timeout=LOOK_S)
            broker.look(pid)
            if time.monotonic() >= next_kill and time.monotonic() < began + seconds:
                next_kill += kill_every_s
                kills += await asyncio.to_thread(_kill, place, next(victims))
        await running
        await asyncio.to_thread(wait_for, lambda: place.status().in_flight == 0, "the last request to end")
        left = (await asyncio.to_thread(place.status)).in_flight
    return Report(
        len(history.records), history.faults(), kills, history.longest_pause_s, broker.grown_mib,
        broker.grown_descriptors, left,
    )  # fmt: skip


def _kill(place: Supervised, name: str) -> bool:
    """SIGKILL a worker; returns whether it was there."""
    try:
        found = [w.pid for w in place.status().workers if w.name == name]
    except LoadOnceError:
        return False
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return bool(found)


def prepare(place: Supervised) -> None:
    """Start the pool that is soaked."""
    place.scripted(workers=WORKERS, flags=f"--steps-per-s {STEPS_PER_S} --slots {SLOTS}")
    place.start_ready()
    wait_for(lambda: len(place.status().workers) == WORKERS, "the workers")


def main(argv: list[str]) -> int:
    """Soak for a while and print the report; returns 1 if anything was lost or has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args(argv).minutes
    with supervised() as place:
        prepare(place)
        report = asyncio.run(soak(place, 60 * minutes))
    print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return int(bool(report.faults) or report.broker_grown_mib > 20 or report.broker_grown_descriptors > 4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
