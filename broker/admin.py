"""Talks to a broker's admin socket: a function for programs, a command for people.

python -m broker.admin status [--json]
python -m broker.admin metrics
python -m broker.admin drain gpu0 [--exit] | resume gpu0 | cancel ID | gone PID
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

import msgspec
import zmq

from broker import curve
from broker import protocol as p
from broker.addresses import address
from broker.errors import LoadOnceError, Unavailable
from broker.status import Status

TIMEOUT_S: Final = 5.0
EXIT_REFUSED: Final = 1
EXIT_UNREACHABLE: Final = 3


def ask(message: p.AdminMessage, where: str = "", timeout_s: float = TIMEOUT_S) -> tuple[str, list[bytes]]:
    """Send one admin message; returns what the broker says and the body frames of its reply.

    Args:
        message: what to ask.
        where: the admin address; empty for the one in the run directory. Over TCP it wants the keys of
            ``LOADONCE_CURVE_KEYS``.
        timeout_s: how long the broker may take.

    Raises:
        Unavailable: no broker answered in time, or none can be at that address.
        LoadOnceError: the broker refused, and says why.
    """
    try:
        where = where or address("admin")
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.linger = 0
            curve.connect(socket, where, os.environ.get("LOADONCE_CURVE_KEYS", ""))
            socket.connect(where)
            socket.send(p.encode(message))
            if not socket.poll(int(1000 * timeout_s)):
                raise Unavailable(f"no broker answers at {where}")
            header, *body = socket.recv_multipart()
    except (zmq.ZMQError, ValueError) as problem:
        raise Unavailable(f"no broker can be asked at {where or 'the admin address'}: {problem}") from None
    answer = p.decode_header(p.to_admin, header)
    if isinstance(answer, p.Failed):
        raise answer.exception()
    return answer.message, body


def ask_status(where: str = "", timeout_s: float = TIMEOUT_S) -> Status:
    """What is going on; raises as `ask` does."""
    _, (body,) = ask(p.AdminStatus(), where, timeout_s)
    return msgspec.msgpack.decode(body, type=Status)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as text, each column as wide as its widest cell."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def describe(status: Status) -> str:
    """The status as people want it: workers, models and their queues, totals."""
    workers = [["WORKER", "STATE", "DEVICE", "MODEL", "IN HAND", "KV USED", "TOKENS", "PID", "UP"]]
    for w in status.workers:
        kv = f"{100 * w.kv_pages_used // w.kv_pages_total}%" if w.kv_pages_total else "-"
        load = f"{w.in_hand}/{w.slots}"
        workers.append(
            [w.name, w.state, w.device, ",".join(w.models), load, kv, str(w.generated_tokens),
             str(w.pid), f"{w.up_s:.0f}s"]
        )  # fmt: skip
    models = [["MODEL", "READY", "WAITING", "OLDEST", "ENDED/S", "TENANTS"]]
    for m in status.models:
        tenants = ", ".join(f"{name or '-'}: {count}" for name, count in sorted(m.tenants.items()))
        models.append(
            [m.name or "(default)", f"{m.ready}/{m.workers}", str(m.waiting), f"{m.oldest_s:.1f}s",
             f"{m.ended_per_s:.1f}", tenants]
        )  # fmt: skip
    failed = ", ".join(f"{code} {count}" for code, count in sorted(status.failed.items())) or "none"
    totals = (
        f"in flight {status.in_flight}, submitted {status.submitted}, done {status.done}, failed: {failed}\n"
        f"continued {status.continuations}, workers lost {status.worker_deaths}, up {status.up_s:.0f}s,"
        f" session {status.session}"
    )
    return "\n\n".join([table(workers), table(models), totals])


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        print(_run(args))
    except Unavailable as problem:
        print(f"broker.admin: {problem.message}", file=sys.stderr)
        return EXIT_UNREACHABLE
    except LoadOnceError as problem:
        print(f"broker.admin: {problem.message}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _run(args: argparse.Namespace) -> str:
    match args.command:
        case "status":
            status = ask_status(args.admin)
            return msgspec.json.encode(status).decode() if args.json else describe(status)
        case "metrics":
            return ask(p.AdminMetrics(), args.admin)[1][0].decode()
        case "drain":
            grace_ms = int(1000 * args.grace_s)
            return ask(p.AdminDrain(args.worker, args.exit, grace_ms), args.admin)[0]
        case "resume":
            return ask(p.AdminResume(args.worker), args.admin)[0]
        case "cancel":
            return ask(p.AdminCancel(args.id), args.admin)[0]
        case _:
            return ask(p.AdminGone(args.pid), args.admin)[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m broker.admin", description="Look at and steer a broker.")
    parser.add_argument("--admin", default="", help="admin address; default: in the run directory")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="workers, queues, totals")
    status.add_argument("--json", action="store_true", help="for machines")
    commands.add_parser("metrics", help="in Prometheus' text format")
    drain = commands.add_parser("drain", help="give a worker no new work")
    drain.add_argument("worker")
    drain.add_argument("--exit", action="store_true", help="and let it go when it is done")
    drain.add_argument("--grace-s", type=float, default=30.0, help="seconds to finish, with --exit")
    commands.add_parser("resume", help="give a worker work again").add_argument("worker")
    commands.add_parser("cancel", help="cancel a request").add_argument("id")
    commands.add_parser("gone", help="say that a process has exited").add_argument("pid", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
