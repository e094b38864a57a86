"""The frontend's settings, each declared once; `broker.options` makes flags, environment and help of them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class FrontendSettings(Struct, frozen=True, kw_only=True):
    """Serve OpenAI's API and POST /generation over HTTP; start several on one port for more cores."""

    host: Annotated[
        str, Meta(description="address to listen on; anything but loopback needs --api-keys", min_length=1)
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port; 0 takes any free one")] = 8000
    reuse_port: Annotated[
        bool, Meta(description="let several frontends share the port; off: a taken port is always an error")
    ] = True
    clients: Annotated[
        str, Meta(description="where the broker listens for clients; empty: in the run directory")
    ] = ""
    admin: Annotated[
        str,
        Meta(description="the broker's admin socket, for /metrics; empty: in the run directory; off: none"),
    ] = ""
    run_dir: Annotated[str, Meta(description="directory of the sockets; empty: one per user under /tmp")] = ""
    curve_keys: Annotated[
        str, Meta(description="directory of CURVE keys; needed for any broker address but ipc and loopback")
    ] = ""
    tls_cert: Annotated[str, Meta(description="PEM file with the certificate chain; empty: plain HTTP")] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the certificate's private key")] = ""
    api_keys: Annotated[
        str, Meta(description="file of hashed API keys, see python -m http_frontend.keys; empty: no keys")
    ] = ""
    allowed_hosts: Annotated[
        str, Meta(description="Host headers that are served, separated by commas; empty: see docs/api.md")
    ] = ""
    cors_origins: Annotated[
        str, Meta(description="origins whose scripts may call, separated by commas, or *; empty: none")
    ] = ""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=7_000_000, description="largest request body")] = (
        4 * 1024 * 1024
    )
    max_header_bytes: Annotated[
        int, Meta(ge=1024, le=1_000_000, description="largest request line and largest single header field")
    ] = 8190
    max_headers: Annotated[int, Meta(ge=16, le=4096, description="most header fields in a request")] = 100
    max_connections: Annotated[int, Meta(ge=1, description="open connections of this process")] = 8192
    max_requests: Annotated[int, Meta(ge=1, description="requests in hand in this process")] = 4096
    max_n: Annotated[int, Meta(ge=1, le=1024, description="largest n, and most prompts in one list")] = 64
    idle_timeout_s: Annotated[
        float, Meta(gt=0, description="a connection may be without a complete request header for so long")
    ] = 75.0
    body_timeout_s: Annotated[
        float, Meta(gt=0, description="a request's body must have arrived after so long")
    ] = 30.0
    heartbeat_s: Annotated[
        float, Meta(gt=0, description="silence in a stream after which a comment line is sent")
    ] = 15.0
    stream_buffer_bytes: Annotated[
        int,
        Meta(ge=4096, description="output that a slow reader may leave unread before its stream is dropped"),
    ] = 256 * 1024
    deadline_s: Annotated[
        float, Meta(gt=0, le=86_400, description="a request's deadline, counted from its arrival")
    ] = 600.0
    drain_grace_s: Annotated[
        float, Meta(ge=0, description="after SIGTERM: seconds to finish what is in hand")
    ] = 25.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level that is logged")
    ] = "info"
    access_log: Annotated[bool, Meta(description="one log line for each request")] = True
