"""A pool under steady load for as long as you like: `python -m tests.soak --minutes 30`.

60 % of the workers' capacity, a tenth of the requests cancelled, one process killed a minute (a worker, the
broker, in turn) and started again. At the end every request must have ended once and whole, and the
memory and the descriptors of the broker must not have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from broker.client import AsyncClient
from tests.history import History
from tests.load import Ask, Load, scripted_mix
from tests.pool import Pool, running_pool

WORKERS, SLOTS, STEPS_PER_S = 2, 16, 50.0
MEAN_TOKENS = 62.5  # of `scripted_mix`
CAPACITY = WORKERS * SLOTS * STEPS_PER_S / MEAN_TOKENS  # requests per second
LOAD = 0.6
FLAGS = ("--slots", str(SLOTS), "--steps-per-s", str(STEPS_PER_S), "--grace-s", "0")


@dataclass
class Soaked:
    """What a soak found."""

    requests: int = 0
    faults: list[str] = field(default_factory=list)
    kills: int = 0
    longest_pause_s: float = 0.0
    memory_mib: list[float] = field(default_factory=list)  # of each life of the broker that is long enough
    memory_growth_mib_per_min: float = 0.0  # the worst of any life
    descriptors_growth: int = 0  # the worst of any life, from its first minute's end


def ask(number: int) -> Ask:
    """The mix, every tenth of which is cancelled after a few chunks."""
    made = scripted_mix(number)
    if number % 10:
        return made
    return Ask(made.prompt, made.max_tokens, made.seed, stream=True, expected=made.expected, cancel_after=3)


class Watch:
    """Looks at the broker's process once a second."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.lives: dict[int, list[tuple[float, float, int]]] = {}  # pid → (when, MiB, descriptors)

    def look(self) -> None:
        """One look; a process that is gone says nothing."""
        process = self._pool.processes.get("broker")
        if process is None or process.poll() is not None:
            return
        proc = Path(f"/proc/{process.pid}")
        try:
            pages = int((proc / "statm").read_text().split()[1])
            descriptors = len(list((proc / "fd").iterdir()))
        except OSError:
            return
        self.lives.setdefault(process.pid, []).append((time.monotonic(), pages * 4096 / 2**20, descriptors))


def summarise(watch: Watch, found: Soaked, settle_s: float) -> None:
    """Memory slope and descriptors of each life of the broker, once it has settled."""
    for looks in watch.lives.values():
        settled = [look for look in looks if look[0] - looks[0][0] >= settle_s]
        if len(settled) < 20:
            continue
        slope, _ = statistics.linear_regression([t for t, _, _ in settled], [mib for _, mib, _ in settled])
        found.memory_mib.append(round(settled[-1][1], 1))
        found.memory_growth_mib_per_min = max(found.memory_growth_mib_per_min, 60 * slope)
        half = len(settled) // 2
        first, last = (max(fds for _, _, fds in part) for part in (settled[:half], settled[half:]))
        found.descriptors_growth = max(found.descriptors_growth, last - first)


async def kill_in_turn(pool: Pool, every_s: float, found: Soaked) -> None:
    """A worker, the other, the broker, and so on; each is started again at once."""
    victims = ["gpu0", "gpu1", "broker"]
    while True:
        await asyncio.sleep(every_s)
        victim = victims[found.kills % len(victims)]
        found.kills += 1
        pool.kill(victim)
        start = pool.broker if victim == "broker" else lambda: pool.scripted(victim, *FLAGS)  # noqa: B023
        await asyncio.to_thread(start)


async def soak(pool: Pool, seconds: float, kill_every_s: float) -> Soaked:
    """Run the load on an empty pool."""
    found, history = Soaked(), History()
    pool.broker()
    for n in range(WORKERS):
        pool.scripted(f"gpu{n}", *FLAGS)
    watch = Watch(pool)

    async def look() -> None:
        while True:
            watch.look()
            await asyncio.sleep(1.0)

    async with AsyncClient(pool.clients) as client:
        others = [
            asyncio.create_task(look()),
            asyncio.create_task(kill_in_turn(pool, kill_every_s, found)),
        ]
        await Load(client, history, ask).at_rate(LOAD * CAPACITY, seconds)
        for task in others:
            task.cancel()
        for result in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
    found.requests, found.faults = len(history.records), history.faults()
    found.longest_pause_s = history.longest_pause_s
    summarise(watch, found, settle_s=min(20.0, seconds / 4))
    return found


def main() -> None:
    """Soak a pool of our own and say what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    args = parser.parse_args()
    with running_pool() as pool:
        found = asyncio.run(soak(pool, 60 * args.minutes, args.kill_every_s))
    print(found)
    if found.faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
