"""The pool as tables for people: workers, models, requests, and what supervisord knows of the rest.

Pure: from a broker's status and supervisord's process list to text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from broker.admin import table
from broker.status import RequestStatus, Status, WorkerStatus

HEALTHY: Final = "RUNNING"


@dataclass(frozen=True)
class Process:
    """A process of supervisord's.

    Attributes:
        name: as supervisorctl takes it, such as workers:worker0.
        state: such as RUNNING, BACKOFF, FATAL.
        pid: 0 if there is none.
        log: path of its log file, or empty.
    """

    name: str
    state: str
    pid: int
    log: str

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Process:
        """From what getAllProcessInfo says of it."""
        group, name = info["group"], info["name"]
        return cls(
            name=name if group == name else f"{group}:{name}",
            state=info["statename"],
            pid=info["pid"],
            log=info["stdout_logfile"] or info["stderr_logfile"],
        )

    @property
    def is_worker(self) -> bool:
        """Whether it should register with the broker; supervisord.conf's names say so."""
        return "worker" in self.name


def token_rates(before: Status, after: Status, seconds: float) -> dict[str, float]:
    """Tokens per second of each worker that is in both."""
    then = {(w.name, w.pid): w.tokens for w in before.workers}
    return {
        w.name: (w.tokens - then[w.name, w.pid]) / seconds
        for w in after.workers
        if (w.name, w.pid) in then and seconds > 0
    }


def workers_table(workers: Sequence[WorkerStatus], rates: Mapping[str, float]) -> str:
    """One line for each registered worker."""
    rows = [["WORKER", "STATE", "DEVICE", "MODEL", "IN HAND", "KV USED", "TOKENS/S", "TOKENS", "PID", "UP"]]
    for w in workers:
        kv = f"{100 * w.kv_pages_used // w.kv_pages_total}%" if w.kv_pages_total else "-"
        rate = f"{rates[w.name]:.0f}" if w.name in rates else "-"
        load, models = f"{w.in_hand}/{w.slots}", ",".join(w.models)
        rows.append(
            [w.name, w.state, w.device, models, load, kv, rate, str(w.tokens), str(w.pid), age(w.up_s)]
        )
    return table(rows)


def models_table(status: Status) -> str:
    """One line for each model and its queue."""
    rows = [["MODEL", "READY", "WAITING", "OLDEST", "ENDED/S", "WAITING BY TENANT"]]
    for m in status.models:
        tenants = ", ".join(f"{name or '-'}: {count}" for name, count in sorted(m.tenants.items()))
        oldest = age(m.oldest_s) if m.waiting else "-"
        name = m.name or "(default)"
        rows.append([name, f"{m.ready}/{m.workers}", str(m.waiting), oldest, f"{m.ended_per_s:.1f}", tenants])
    return table(rows)


def requests_table(requests: Sequence[RequestStatus]) -> str:
    """One line for each request in flight, the oldest first."""
    rows = [["REQUEST", "MODEL", "TENANT", "PRIO", "STATE", "WORKER", "AGE", "TOKENS", "ATTEMPTS"]]
    for r in requests:
        rows.append(
            [r.id, r.model or "(default)", r.tenant or "-", str(r.priority), r.state, r.worker or "-",
             age(r.age_s), str(r.tokens), str(r.attempts)]
        )  # fmt: skip
    return table(rows)


def absent(processes: Sequence[Process], registered: frozenset[int] | None) -> list[Process]:
    """Processes that can't do their part: not running, or workers that the broker doesn't have yet.

    Args:
        processes: all that supervisord has.
        registered: pids of the workers that the broker has; None if it can't be asked.
    """
    return [
        p
        for p in processes
        if p.state != HEALTHY or (p.is_worker and registered is not None and p.pid not in registered)
    ]


def absent_table(processes: Sequence[Process], last_words: Callable[[str], str]) -> str:
    """One line for each, with what it said last: how far a load is, or why it failed."""
    rows = [["NOT SERVING", "STATE", "SAID LAST"]]
    for process in processes:
        state = "LOADING" if process.state == HEALTHY else process.state
        rows.append([process.name, state, last_words(process.log) if process.log else ""])
    return table(rows)


def totals(status: Status) -> str:
    """What the broker has counted since it started."""
    failed = ", ".join(f"{code} {count}" for code, count in sorted(status.failed.items())) or "none"
    return (
        f"in flight {status.in_flight}, done {status.done}, failed: {failed},"
        f" continued {status.continuations}, workers lost {status.worker_deaths}, up {age(status.up_s)}"
    )


def age(seconds: float) -> str:
    """A duration in few characters: 4.2s, 3m20s, 5h07m, 2d04h."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"
