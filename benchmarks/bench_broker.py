"""The broker's own speed, beside libzmq's `zmq.proxy` (C, ROUTER/DEALER) over the same sockets and frames.

    python benchmarks/bench_broker.py [--seconds 2] [--rounds 5] [--json FILE]

Client, middle and worker are a process each. Both middles run in turn, round by round, and medians are
compared, so that a busy machine slows both alike; beside them stands the CPU time that the middle itself
took for a request, which other load on the machine hardly changes. Claims:

- requests/s with 100 in flight, 200-byte prompts: at least 0.6 of the proxy's;
- the round trip at one in flight: at most 60 µs more than through the proxy;
- 8 workers × 64 streams × 50 steps/s = 25,600 tokens/s on less than 30 % of a core;
- a dispatch with 100,000 queued requests costs no more than with 100.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from broker import protocol as p
from broker.admin import ask_status
from broker.errors import LoadOnceError
from broker.logs import Log
from broker.scheduler import Scheduler
from broker.settings import BrokerSettings

ROOT = Path(__file__).resolve().parents[1]
PROMPT = p.encode(p.Request(prompt="x" * 200, params=p.Params(max_tokens=16, seed=1)))
OUTCOME = p.encode(p.Outcome(finish_reason="stop", usage=p.Usage(50, 1)))
WORKERS, STREAMS, STEPS_PER_S = 8, 64, 50.0
Context = multiprocessing.get_context("spawn")


# ── processes ────────────────────────────────────────────────────────────────────────────────────────


def dealer(address: str) -> zmq.Socket[bytes]:
    """A connected DEALER."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 100_000
    socket.connect(address)
    return socket


def proxy(front: str, back: str) -> None:
    """The other middle: libzmq's own, in C."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    frontend, backend = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket, address in ((frontend, front), (backend, back)):
        socket.sndhwm = socket.rcvhwm = 100_000
        socket.bind(address)
    zmq.proxy(frontend, backend)


def proxied_worker(address: str) -> None:
    """Answers what comes through the proxy: with a `Done`, as through the broker."""
    socket = dealer(address)
    while True:
        identity, header, _ = socket.recv_multipart()
        submit = p.from_client.decode(header)
        assert isinstance(submit, p.Submit)
        done = p.Done(id=submit.id, worker="gpu0", attempts=1)
        socket.send_multipart([identity, p.encode(done), OUTCOME])


def instant_worker(address: str, slots: int) -> None:
    """Registers with the broker and ends each request at once."""
    socket = dealer(address)
    ready = p.Ready("gpu0", "none", "here", os.getpid(), slots, [p.ModelInfo("m", 4096, 1000)])
    socket.send(p.encode(ready))
    beat_due = 0.0
    while True:
        if time.monotonic() >= beat_due:
            socket.send(p.encode(p.WorkerBeat("")))
            beat_due = time.monotonic() + 1
        if not socket.poll(500):
            continue
        header, *_ = socket.recv_multipart()
        message = p.to_worker.decode(header)
        if isinstance(message, p.Work):
            socket.send_multipart([p.encode(p.Done(id=message.id)), OUTCOME])


def streaming_worker(address: str, name: str) -> None:
    """One `chunk` message a step for all streams in hand; endless."""
    socket = dealer(address)
    ready = p.Ready(name, "none", "here", os.getpid(), STREAMS, [p.ModelInfo("m", 4096, 1000)])
    socket.send(p.encode(ready))
    ids: list[str] = []
    step, steps = time.monotonic(), 0
    frame = p.encode(p.Chunk(start=100, token_ids=[12345], text=" token"))
    while True:
        while socket.poll(max(0, int(1000 * (step - time.monotonic())))):
            header, *_ = socket.recv_multipart()
            message = p.to_worker.decode(header)
            if isinstance(message, p.Work):
                ids.append(message.id)
        step = max(step + 1 / STEPS_PER_S, time.monotonic() - 0.1)
        steps += 1
        if ids:
            socket.send_multipart([p.encode(p.Chunks(ids, [1] * len(ids))), *[frame] * len(ids)])
        if steps % 50 == 0:
            socket.send(p.encode(p.WorkerBeat("", running=len(ids), steps=steps)))


@contextlib.contextmanager
def process(target: object, *args: object) -> Iterator[int]:
    """Runs a function of ours in a process; yields its pid."""
    assert callable(target)
    started = Context.Process(target=target, args=args, daemon=True)
    started.start()
    assert started.pid is not None
    try:
        yield started.pid
    finally:
        started.kill()
        started.join()


@contextlib.contextmanager
def broker(directory: str) -> Iterator[subprocess.Popen[bytes]]:
    """A broker that answers."""
    command = [sys.executable, "-m", "broker", "--run-dir", directory, "--log-level", "error"]
    started = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(directory, workers=0)
        yield started
    finally:
        started.terminate()
        started.wait()


def wait_for(directory: str, workers: int) -> None:
    """Until so many workers are registered."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with contextlib.suppress(LoadOnceError):
            if len(ask_status(f"ipc://{directory}/admin", 2.0).workers) >= workers:
                return
        time.sleep(0.05)
    raise SystemExit(f"no broker with {workers} workers after 30 s")


# ── the client ───────────────────────────────────────────────────────────────────────────────────────


def keep_in_flight(address: str, count: int, seconds: float, middle: int) -> tuple[float, float]:
    """Answers per second with `count` requests in flight, and the middle's CPU microseconds for each."""
    socket = dealer(address)
    headers = {f"request-{n:027d}": b"" for n in range(count)}
    headers = {id: p.encode(p.Submit(id=id)) for id in headers}
    for header in headers.values():
        socket.send_multipart([header, PROMPT])
    answers, used = 0, 0.0
    begun = warm = time.perf_counter()
    while time.perf_counter() - begun < seconds + 0.3:
        header, *_ = socket.recv_multipart()
        done = p.to_client.decode(header)
        assert isinstance(done, p.Done), done
        socket.send_multipart([headers[done.id], PROMPT])
        answers += 1
        if answers and warm == begun and time.perf_counter() - begun > 0.3:
            warm, answers, used = time.perf_counter(), 0, cpu_seconds(middle)
    rate = answers / (time.perf_counter() - warm)
    used = cpu_seconds(middle) - used
    socket.close(linger=0)
    return rate, 1e6 * used / max(answers, 1)


def through_proxy(count: int, seconds: float) -> tuple[float, float]:
    """One measurement with the proxy in the middle."""
    with tempfile.TemporaryDirectory(prefix="lo-") as directory:
        front, back = f"ipc://{directory}/front", f"ipc://{directory}/back"
        with process(proxy, front, back) as middle, process(proxied_worker, back):
            return keep_in_flight(front, count, seconds, middle)


def through_broker(count: int, seconds: float) -> tuple[float, float]:
    """One measurement with the broker in the middle."""
    with (
        tempfile.TemporaryDirectory(prefix="lo-") as directory,
        broker(directory) as running,
        process(instant_worker, f"ipc://{directory}/workers", 256),
    ):
        wait_for(directory, workers=1)
        return keep_in_flight(f"ipc://{directory}/clients", count, seconds, running.pid)


def compare(count: int, seconds: float, rounds: int) -> dict[str, float]:
    """Medians of answers per second and CPU time for each: through the proxy, through the broker, in turn."""
    pairs = [(through_proxy(count, seconds), through_broker(count, seconds)) for _ in range(rounds)]
    found = {}
    for side, name in enumerate(("proxy", "broker")):
        found[f"{name}_requests_per_s"] = statistics.median(pair[side][0] for pair in pairs)
        found[f"{name}_cpu_us"] = statistics.median(pair[side][1] for pair in pairs)
    return found


# ── the claims ───────────────────────────────────────────────────────────────────────────────────────


def throughput(seconds: float, rounds: int) -> dict[str, float]:
    """Requests per second with 100 in flight."""
    found = compare(100, seconds, rounds)
    return {**found, "ratio": found["broker_requests_per_s"] / found["proxy_requests_per_s"]}


def round_trip(seconds: float, rounds: int) -> dict[str, float]:
    """What the broker adds to a round trip at one in flight."""
    found = compare(1, seconds, rounds)
    proxy_us, broker_us = 1e6 / found["proxy_requests_per_s"], 1e6 / found["broker_requests_per_s"]
    return {**found, "proxy_us": proxy_us, "broker_us": broker_us, "added_us": broker_us - proxy_us}


def streaming(seconds: float) -> dict[str, float]:
    """CPU of the broker while eight workers stream to one client and it reads."""
    with (
        tempfile.TemporaryDirectory(prefix="lo-") as directory,
        broker(directory) as running,
        contextlib.ExitStack() as stack,
    ):
        for n in range(WORKERS):
            stack.enter_context(process(streaming_worker, f"ipc://{directory}/workers", f"gpu{n}"))
        wait_for(directory, workers=WORKERS)
        socket = dealer(f"ipc://{directory}/clients")
        for n in range(WORKERS * STREAMS):
            socket.send_multipart([p.encode(p.Submit(id=f"s{n}", stream=True)), PROMPT])
        read_frames(socket, 1.0)
        before, begun = cpu_seconds(running.pid), time.perf_counter()
        tokens = read_frames(socket, seconds)
        elapsed = time.perf_counter() - begun
        used = cpu_seconds(running.pid) - before
        socket.close(linger=0)
    return {"tokens_per_s": tokens / elapsed, "core_share": used / elapsed}


def read_frames(socket: zmq.Socket[bytes], seconds: float) -> int:
    """How many body frames came."""
    frames, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        if socket.poll(100):
            frames += len(socket.recv_multipart()) - 1
    return frames


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def dispatch_cost(queued: int, turns: int = 2000) -> float:
    """Microseconds from one `done` to the next `work`, in the core alone."""
    log = Log("bench", level="error", stream=io.StringIO())
    settings = BrokerSettings(queue_limit=10_000_000, client_limit=10_000_000)
    scheduler = Scheduler(settings, "bench-session", 0.0, log)
    ready = p.Ready("gpu0", "none", "here", 1, 1, [p.ModelInfo("m", 4096, 1000)])
    scheduler.on_worker(b"w", ready, [], 0.0)
    for n in range(queued + turns + 1):
        submit = p.Submit(id=f"r{n}", tenant=f"t{n % 20}", cost=64)
        scheduler.on_client(b"c%d" % (n % 50), submit, [PROMPT], False, 0.0)
    begun = time.perf_counter()
    for _ in range(turns):
        (work,) = [f[0] for side, _, f in scheduler.take() if side == "worker" and b"work" in f[0]]
        message = p.to_worker.decode(work)
        assert isinstance(message, p.Work)
        scheduler.on_worker(b"w", p.Done(id=message.id), [OUTCOME], 0.0)
    return 1e6 * (time.perf_counter() - begun) / turns


def dispatch(rounds: int) -> dict[str, float]:
    """What the length of the queue adds to a dispatch."""
    pairs = [(dispatch_cost(100), dispatch_cost(100_000)) for _ in range(rounds)]
    short, long = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {"queued_100_us": short, "queued_100000_us": long, "ratio": long / short}


def main() -> None:
    """Run all and print a line for each claim."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["throughput", "round_trip", "streaming", "dispatch"])
    parser.add_argument("--json", default="", help="also write the numbers to this file")
    args = parser.parse_args()
    found: dict[str, Callable[[], dict[str, float]]] = {
        "throughput": lambda: throughput(args.seconds, args.rounds),
        "round_trip": lambda: round_trip(args.seconds, args.rounds),
        "streaming": lambda: streaming(max(args.seconds, 5.0)),
        "dispatch": lambda: dispatch(3),
    }
    results = {}
    for name, measure in found.items():
        if args.only in (None, name):
            results[name] = measure()
            print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
