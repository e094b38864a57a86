"""The broker's settings, each declared once; `broker.options` makes flags, environment and help of them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class BrokerSettings(Struct, frozen=True, kw_only=True):
    """Share requests out over a pool of workers."""

    clients: Annotated[
        str, Meta(description="where clients connect; empty: a socket in the run directory")
    ] = ""
    workers: Annotated[
        str, Meta(description="where workers connect; empty: a socket in the run directory")
    ] = ""
    admin: Annotated[str, Meta(description="where admins connect; empty: a socket in the run directory")] = ""
    run_dir: Annotated[str, Meta(description="directory of the sockets; empty: one per user under /tmp")] = ""
    queue_limit: Annotated[
        int, Meta(ge=1, le=10_000_000, description="requests that may wait for one model")
    ] = 10_000
    queue_mib: Annotated[
        int, Meta(ge=1, le=1_000_000, description="MiB of requests that may wait for one model")
    ] = 512
    client_limit: Annotated[
        int, Meta(ge=1, description="requests of one client, waiting and running together")
    ] = 10_000
    default_deadline_s: Annotated[
        float, Meta(gt=0, description="seconds from arrival to the end, for requests that name no deadline")
    ] = 600.0
    no_worker_wait_s: Annotated[
        float, Meta(ge=0, description="seconds that a request waits for a model without workers")
    ] = 20.0
    max_attempts: Annotated[
        int, Meta(ge=1, le=100, description="workers that a request may bring down before it fails")
    ] = 2
    stall_s: Annotated[
        float,
        Meta(gt=0, description="seconds without a model step, with work in hand, that make a worker stalled"),
    ] = 180.0
    affinity_tokens: Annotated[
        int, Meta(ge=0, description="how much busier than the idlest the worker that knows the prefix may be")
    ] = 2048
    curve_keys: Annotated[
        str, Meta(description="directory of CURVE keys; needed for any address but ipc and loopback")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level that is logged")
    ] = "info"
