"""Floods a running broker with random messages while a valid client measures: `python -m tests.fuzz.flood`.

The messages are wrong in every way that comes cheap (counts, headers, states, bombs, pickles) or right but
out of place. Prints the broker's memory before and after, and the valid client's 99th percentile beside
that of a quiet broker.
"""

from __future__ import annotations

import argparse
import pickle
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from broker import protocol as p
from tests.peers import Peer, RawClient
from tests.pool import Pool, running_pool

MAX_FRAMES = 5


@dataclass
class Flooded:
    """What was measured."""

    sent: int
    malformed: int
    memory_before_mib: float
    memory_after_mib: float
    quiet_p99_ms: float
    flooded_p99_ms: float


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


class Rubbish:
    """Messages from a seeded source."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        ready = p.Ready("gpu9", "none", "there", 1, 1, [p.ModelInfo("other", 1, 1)])
        whole = [
            p.Submit(id="a", model="nonesuch"), p.Submit(id="a", version=9), p.Cancel("a"), p.Ping(["b"]),
            p.ListModels(), p.Chunks(["1.1"], [1]), p.Done("1.1"), p.Failed("made_up", "x", "1.1"), ready,
            p.WorkerBeat("x"), p.HandOff(["1.1"]), p.Leave(), p.Work("a", "b"), p.Pong("x"), p.AdminStatus(),
        ]  # fmt: skip
        self._headers = [p.encode(message) for message in whole]
        self._bombs = [
            b"\xdd\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x9f\xfd\x74\xf7\xdd\x74\xff\xfd\xbd",
            b"\x91" * 5000, b"\x81\xa1a" * 3000, b"\x80", b"", b"GET / HTTP/1.1",
            pickle.dumps({"type": "submit"}),
        ]  # fmt: skip

    def header(self) -> bytes:
        """A right one, a broken one, or none."""
        draw = self._random
        match draw.randrange(4):
            case 0:
                return draw.choice(self._headers)
            case 1:
                broken = bytearray(draw.choice(self._headers))
                for _ in range(draw.randrange(1, 4)):
                    broken[draw.randrange(len(broken))] = draw.randrange(256)
                return bytes(broken)
            case 2:
                return draw.choice(self._bombs)
            case _:
                return draw.randbytes(draw.randrange(40))

    def message(self) -> list[bytes]:
        """A multipart message."""
        frames = [self.header()]
        if self._random.randrange(3) == 0:
            frames.insert(0, b"")
        return frames + [self._random.randbytes(8) for _ in range(self._random.randrange(MAX_FRAMES))]


def valid_p99_ms(pool: Pool, until: threading.Event, least: int = 300) -> float:
    """The round trip of a small request, over and over."""
    took: list[float] = []
    with RawClient(pool.clients) as client:
        while len(took) < least or not until.is_set():
            began = time.monotonic()
            client.submit(f"r{len(took)}")
            assert isinstance(client.answer(), p.Done)
            took.append(time.monotonic() - began)
    return 1000 * sorted(took)[len(took) * 99 // 100]


def send_rubbish(directory: str, count: int, seed: int, per_s: float) -> None:
    """To clients' and workers' sockets in turn; answers are read and thrown away."""
    source, began = Rubbish(seed), time.monotonic()
    with Peer(f"ipc://{directory}/clients") as client, Peer(f"ipc://{directory}/workers") as worker:
        for n in range(count):
            peer = worker if n % 3 == 0 else client
            peer.send(*source.message())
            if n % 100 == 0:
                for other in (client, worker):
                    while other.heard(0) is not None:
                        pass
                time.sleep(max(0.0, began + n / per_s - time.monotonic()))


def flood(pool: Pool, count: int, seed: int = 1, per_s: float = 5000.0) -> Flooded:
    """Start a broker and a worker in the pool and flood them.

    Args:
        pool: an empty pool.
        count: messages.
        seed: of their choice.
        per_s: how many a second; the valid client's wait is compared at this load.
    """
    pid = pool.broker("--log-level", "warning").pid
    pool.scripted("gpu0", "--steps-per-s", "2000", "--slots", "8")
    done = threading.Event()
    done.set()
    quiet = valid_p99_ms(pool, done, least=1000)
    before = memory_mib(pid)
    done.clear()
    found: list[float] = []
    valid = threading.Thread(target=lambda: found.append(valid_p99_ms(pool, done)))
    valid.start()
    # In a process of its own: the valid client would wait for its thread, not for the broker.
    given = ["--into", str(pool.directory), "--count", str(count), "--seed", str(seed), "--per-s", str(per_s)]
    flooder = pool.start("flooder", "-m", "tests.fuzz.flood", *given)
    assert flooder.wait() == 0, pool.log("flooder")
    done.set()
    valid.join()
    after = memory_mib(pid)
    return Flooded(count, pool.status().malformed, before, after, quiet, found[0])


def main() -> None:
    """Flood a broker of our own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--per-s", type=float, default=5_000.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--into", default="", help="only send, to the broker of this run directory")
    args = parser.parse_args()
    if args.into:
        send_rubbish(args.into, args.count, args.seed, args.per_s)
        return
    with running_pool() as pool:
        print(flood(pool, args.count, args.seed, args.per_s))


if __name__ == "__main__":
    main()
