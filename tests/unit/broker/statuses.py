"""Statuses for tests of what shows them: every field has a value, a test names those that matter."""

from __future__ import annotations

from typing import Any

from broker.status import ModelStatus, RequestStatus, Status, WorkerStatus

HOST = "here"


def worker(name: str = "worker0", **fields: Any) -> WorkerStatus:
    """A ready worker on HOST."""
    values: dict[str, Any] = {
        "name": name, "state": "ready", "device": "cuda:0", "host": HOST, "pid": 100, "models": ["m"],
        "slots": 8, "in_hand": 0, "outstanding_tokens": 0, "kv_pages_used": 0, "kv_pages_total": 0,
        "steps": 0, "prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0, "preemptions": 0,
        "tokens": 0, "silent_s": 0.1, "up_s": 61.0,
    }  # fmt: skip
    return WorkerStatus(**{**values, **fields})


def model(name: str = "m", **fields: Any) -> ModelStatus:
    """A model with one ready worker and nothing waiting."""
    values: dict[str, Any] = {
        "name": name, "aliases": [], "workers": 1, "ready": 1, "waiting": 0, "waiting_bytes": 0,
        "oldest_s": 0.0, "tenants": {}, "ended_per_s": 0.0,
    }  # fmt: skip
    return ModelStatus(**{**values, **fields})


def request(id: str = "r1", **fields: Any) -> RequestStatus:
    """A running request."""
    values: dict[str, Any] = {
        "id": id, "model": "m", "tenant": "", "priority": 5, "state": "running", "worker": "worker0",
        "age_s": 1.0, "attempts": 1, "chunks": 0, "tokens": 0,
    }  # fmt: skip
    return RequestStatus(**{**values, **fields})


def status(*workers: WorkerStatus, **fields: Any) -> Status:
    """A broker with these workers."""
    values: dict[str, Any] = {
        "session": "s1", "pid": 1, "up_s": 3600.0, "in_flight": 0, "clients": 0, "workers": list(workers),
        "models": [], "requests": [], "failed": {},
    }  # fmt: skip
    counted = dict.fromkeys((f for f in Status.__struct_fields__ if f not in values), 0)
    return Status(**{**counted, **values, **fields})
