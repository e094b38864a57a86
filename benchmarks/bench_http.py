"""`make bench-http`: requests per second beside bare aiohttp, mosec and FastAPI, and a thousand streams.

All sides run in the same session, one after the other in turns, with wrk on the same machine. Ours is the
whole way: frontend, broker, echo worker and back. Needs wrk; installs the peers into benchmarks/.venv-http.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import uvloop

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent
PEERS_VENV: Final = HERE / ".venv-http"
PEERS: Final = ("aiohttp==3.14.5", "uvloop==0.23.0", "mosec==0.9.8", "fastapi==0.165.0", "uvicorn==0.54.0",
                "httptools==0.9.0")  # fmt: skip
CONNECTIONS: Final = (1, 32, 256)
PATIENCE_S: Final = 20.0


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(*command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, ended with the block."""
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(url: str) -> float:
    """Wait until a URL answers with any status below 500; returns how long it took."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return time.monotonic() - began
        except urllib.error.HTTPError as problem:
            problem.close()
            if problem.code < 500:
                return time.monotonic() - began
        except OSError:
            pass
        time.sleep(0.01)
    raise SystemExit(f"{url} doesn't answer")


@contextlib.contextmanager
def our_pool(stack: contextlib.ExitStack, *worker_flags: str) -> Iterator[dict[str, Any]]:
    """Broker, echo worker, one frontend; what it took to start and who is who."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="lo-"))
    env, port = {"LOADONCE_RUN_DIR": directory}, free_port()
    broker = stack.enter_context(running(sys.executable, "-m", "broker", "--log-level", "warning", env=env))
    worker = stack.enter_context(
        running(sys.executable, "benchmarks/http/echo_worker.py", *worker_flags, env=env)
    )
    frontend = stack.enter_context(
        running(sys.executable, "-m", "http_frontend", "--port", str(port), "--host", "127.0.0.1", env=env)
    )
    started_s = wait_for(f"http://127.0.0.1:{port}/health")
    wait_for(f"http://127.0.0.1:{port}/ready")
    pids = {"frontend": frontend.pid, "broker": broker.pid, "worker": worker.pid}
    yield {"port": port, "started_s": round(started_s, 3), "pids": pids}


def cpu_seconds(groups: list[int]) -> float:
    """CPU time that the process groups have used, threads and children included."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) in groups else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def measured(url: str, groups: list[int], connections: int, seconds: float) -> dict[str, float]:
    """One run of wrk, and the CPU time per request of the side that it talked to."""
    before = cpu_seconds(groups)
    found = wrk(url, connections, seconds)
    return {**found, "cpu_us": 1e6 * (cpu_seconds(groups) - before) / found.pop("requests")}


def wrk(url: str, connections: int, seconds: float) -> dict[str, float]:
    """One run of wrk."""
    said = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{round(seconds)}s", "--latency",
         "-s", HERE / "http" / "post.lua", url],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if "Non-2xx" in said or "Socket errors" in said:
        raise SystemExit(f"{url} answered badly:\n{said}")
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1])  # type: ignore[index]
    latency = {
        name: microseconds(*found) for name, *found in re.findall(r"(50|99)%\s+([\d.]+)(us|ms|s)", said)
    }
    count = float(re.search(r"(\d+) requests in", said)[1])  # type: ignore[index]
    return {"requests": count, "per_s": rate, "p50_us": latency["50"], "p99_us": latency["99"]}


def microseconds(value: str, unit: str) -> float:
    """What wrk prints as a time."""
    return float(value) * {"us": 1, "ms": 1000, "s": 1e6}[unit]


def throughput(seconds: float, rounds: int) -> dict[str, Any]:
    """Requests per second of every side; sides take turns, the median of the rounds counts."""
    python = str(PEERS_VENV / "bin" / "python")
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(our_pool(stack))
        groups = list(ours["pids"].values())
        urls = {"loadonce": (f"http://127.0.0.1:{ours['port']}/v1/chat/completions", groups)}
        for name in ("aiohttp", "fastapi", "mosec"):
            port = free_port()
            flags = ("--address", "127.0.0.1", "--port", str(port)) if name == "mosec" else (str(port),)
            peer = stack.enter_context(running(python, f"benchmarks/http/peer_{name}.py", *flags))
            path = "/inference" if name == "mosec" else "/v1/chat/completions"
            urls[name] = (f"http://127.0.0.1:{port}{path}", [peer.pid])
            wait_for(f"http://127.0.0.1:{port}/")
        runs: dict[tuple[str, int], list[dict[str, float]]] = {}
        for _ in range(rounds):
            for connections in CONNECTIONS:
                for name, (url, groups) in urls.items():
                    one = measured(url, groups, connections, seconds)
                    runs.setdefault((name, connections), []).append(one)
    found: dict[str, Any] = {"started_s": ours["started_s"]}
    for (name, connections), many in runs.items():
        keys = many[0]
        found.setdefault(name, {})[str(connections)] = {
            key: round(statistics.median(one[key] for one in many), 1) for key in keys
        }
    return found


class Reader(asyncio.Protocol):
    """Reads one stream; notes how old each token is when it arrives."""

    def __init__(self, request: bytes, delays: list[float], ended: asyncio.Future[None]) -> None:
        self.request, self.delays, self.ended = request, delays, ended
        self.rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Note the times in what came."""
        now = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n\n")
        for line in lines:
            _, found, text = line.partition(b'"content":"')
            if found and text[:1] != b'"':
                self.delays.append(now - float(text[: text.index(b'"')]))
            elif b"[DONE]" in line and not self.ended.done():
                self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """A stream that ends without [DONE] fails the benchmark."""
        if not self.ended.done():
            self.ended.set_exception(SystemExit("a stream broke off"))


async def read_streams(port: int, count: int, tokens: int) -> list[float]:
    """Open streams over two seconds and read them to their ends."""
    loop = asyncio.get_running_loop()
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": tokens})
    request = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()
    delays: list[float] = []
    ends = []
    transports = []
    for _ in range(count):
        ended: asyncio.Future[None] = loop.create_future()
        made = await loop.create_connection(
            lambda ended=ended: Reader(request, delays, ended), "127.0.0.1", port
        )
        transports.append(made[0])
        ends.append(ended)
        await asyncio.sleep(2 / count)
    await asyncio.gather(*ends)
    for transport in transports:
        transport.close()
    return delays


def streams(count: int, tokens_per_s: float, seconds: float) -> dict[str, Any]:
    """Delay from a worker's send to the client's receive, and the frontend's memory."""
    with contextlib.ExitStack() as stack:
        flags = ("--tokens-per-s", str(tokens_per_s), "--phases", "10")
        ours = stack.enter_context(our_pool(stack, *flags))
        delays = sorted(uvloop.run(read_streams(ours["port"], count, int(seconds * tokens_per_s))))
        status = Path(f"/proc/{ours['pids']['frontend']}/status").read_text()
    peak_kib = int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]
    return {
        "streams": count,
        "tokens_per_s": tokens_per_s,
        "tokens": len(delays),
        "p50_ms": round(1000 * delays[len(delays) // 2], 2),
        "p99_ms": round(1000 * delays[len(delays) * 99 // 100], 2),
        "max_ms": round(1000 * delays[-1], 2),
        "frontend_mib": round(peak_kib / 1024, 1),
    }


def install_peers() -> None:
    """Make benchmarks/.venv-http if it isn't there."""
    if not PEERS_VENV.exists():
        subprocess.run([sys.executable, "-m", "venv", PEERS_VENV], check=True)
        subprocess.run([PEERS_VENV / "bin" / "pip", "install", "-q", *PEERS], check=True)


def report(found: dict[str, Any]) -> None:
    """Print what was measured, with the ratios that matter."""
    for connections in map(str, CONNECTIONS):
        for name in ("aiohttp", "loadonce", "mosec", "fastapi"):
            one = found["throughput"][name][connections]
            ratio = one["per_s"] / found["throughput"]["mosec"][connections]["per_s"]
            print(
                f"{connections:>4} connections  {name:9} {one['per_s']:9.0f}/s  p50 {one['p50_us']:8.0f} µs  "
                f"p99 {one['p99_us']:8.0f} µs  CPU {one['cpu_us']:4.0f} µs  {ratio:4.2f} × mosec"
            )
    print(f"start to listening {found['throughput']['started_s']} s; streams: {found['streams']}")


def main() -> None:
    """Measure and write benchmarks/results/http.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3, help="of each run of wrk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1000)
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is needed: apt-get install wrk")
    install_peers()
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "throughput": throughput(given.seconds, given.rounds),
        "streams": streams(given.streams, 20.0, 8.0),
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "http.json").write_text(json.dumps(found, indent=2) + "\n")
    report(found)


if __name__ == "__main__":
    main()
