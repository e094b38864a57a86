"""Who may have how much: rates per key, Host headers, origins. Takes the time, never sleeps.

The limits on bytes, header lines and read times are settings that `app.py` hands to aiohttp and to
`incoming.py`; `docs/api.md` lists them all in one table.
"""

from __future__ import annotations

import ipaddress
import math
from typing import Final
from urllib.parse import urlsplit

from http_frontend.errors import HttpError
from http_frontend.incoming import Caller

_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Bucket:
    """A token bucket that holds one minute's worth. `level` may go below zero: what is spent is spent."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self._at = now

    def fill(self, now: float) -> None:
        """Add what has trickled in since."""
        self.level = min(self.per_minute, self.level + (now - self._at) * self.per_minute / 60)
        self._at = now

    def until(self, level: float) -> float:
        """Seconds until it holds so much."""
        return max(0.0, (level - self.level) * 60 / self.per_minute)


class Rates:
    """Requests and tokens per minute of each key. `now` is seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[Bucket | None, Bucket | None]] = {}

    def take(self, caller: Caller, now: float) -> bytes:
        """Count one request; returns its ``x-ratelimit-*`` header lines.

        Raises:
            HttpError: 429 with Retry-After: the key has used up its minute.
        """
        if not (caller.requests_per_minute or caller.tokens_per_minute):
            return b""
        requests, tokens = self._of(caller, now)
        lines = []
        if requests is not None:
            requests.fill(now)
            if requests.level < 1:
                raise _rate_error("requests", requests, requests.until(1))
            requests.level -= 1
            lines += _lines("requests", requests)
        if tokens is not None:
            tokens.fill(now)
            if tokens.level < 1:
                raise _rate_error("tokens", tokens, tokens.until(1))
            lines += _lines("tokens", tokens)
        return "".join(lines).encode("ascii")

    def spend(self, caller: Caller, tokens: int, now: float) -> None:
        """Count the tokens that a request has used, once they are known."""
        if caller.tokens_per_minute:
            bucket = self._of(caller, now)[1]
            if bucket is not None:
                bucket.fill(now)
                bucket.level -= tokens

    def _of(self, caller: Caller, now: float) -> tuple[Bucket | None, Bucket | None]:
        limits = (caller.requests_per_minute, caller.tokens_per_minute)
        found = self._buckets.get(caller.name)
        if found is None or tuple(b.per_minute if b else 0 for b in found) != limits:
            # New, or the key file gave it other limits.
            requests, tokens = (Bucket(limit, now) if limit else None for limit in limits)
            found = self._buckets[caller.name] = (requests, tokens)
        return found


def _lines(what: str, bucket: Bucket) -> list[str]:
    return [
        f"x-ratelimit-limit-{what}: {bucket.per_minute}\r\n",
        f"x-ratelimit-remaining-{what}: {max(0, int(bucket.level))}\r\n",
        f"x-ratelimit-reset-{what}: {bucket.until(bucket.per_minute):.3f}s\r\n",
    ]


def _rate_error(what: str, bucket: Bucket, wait_s: float) -> HttpError:
    lines = (line.strip().partition(": ") for line in _lines(what, bucket))
    headers = tuple((name, value) for name, _, value in lines)
    message = f"This key may use {bucket.per_minute} {what} per minute."
    retry = ("Retry-After", str(max(1, math.ceil(wait_s))))
    return HttpError(429, "rate_limit_exceeded", message, headers=(*headers, retry))


class Hosts:
    """Which Host headers are served, so that a web page can't reach us under a name of its own.

    Args:
        allowed: names separated by commas; ``*`` is any, ``*.example.org`` any below. Empty: loopback
            names when we listen on loopback, any when keys guard us.
        loopback: whether we listen on loopback only.
    """

    def __init__(self, allowed: str, *, loopback: bool) -> None:
        names = {name.strip().lower() for name in allowed.split(",") if name.strip()}
        if not names:
            names = set(_LOOPBACK_NAMES) if loopback else {"*"}
        self._any = "*" in names
        self._names = names | (_LOOPBACK_NAMES if loopback else set())
        self._below = tuple(name[1:] for name in names if name.startswith("*."))
        self._known: set[str] = set()  # header values that were found good, bounded

    def check(self, host: str) -> None:
        """Raises:
        HttpError: 421, this host isn't served here.
        """
        if self._any or host in self._known:
            return
        name = _name_of(host)
        if name not in self._names and not (self._below and name.endswith(self._below)):
            raise HttpError(421, "host_not_allowed", f"The host {host[:100]!r} isn't served here.")
        if len(self._known) < 1024:
            self._known.add(host)


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Origins:
    """Cross-origin requests: off, some origins, or any.

    Args:
        allowed: origins separated by commas, or ``*``.
    """

    def __init__(self, allowed: str) -> None:
        self._allowed = frozenset(
            origin.strip().rstrip("/") for origin in allowed.split(",") if origin.strip()
        )

    def lines(self, origin: str) -> bytes:
        """Header lines for an answer to that origin; none if it may not read it."""
        if "*" in self._allowed:
            return b"Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: *\r\n"
        if origin not in self._allowed:
            return b""
        return (
            b"Access-Control-Allow-Origin: %s\r\nAccess-Control-Expose-Headers: *\r\nVary: Origin\r\n"
            % origin.encode("latin-1", "replace")
        )


PREFLIGHT: Final = (
    b"Access-Control-Allow-Methods: GET, POST, OPTIONS\r\n"
    b"Access-Control-Allow-Headers: authorization, content-type, x-request-id, traceparent\r\n"
    b"Access-Control-Max-Age: 600\r\n"
)
