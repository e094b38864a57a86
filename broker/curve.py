"""Who may connect over TCP: CURVE keys in a directory. Part of the public face.

A directory holds ``broker.key`` (public), ``broker.key_secret`` (the broker's only), ``own.key_secret``
(a peer's own) and ``allowed/`` with the public keys of peers (the broker's only), in the format of
`zmq.auth.create_certificates`. Addresses that stay on this host (ipc, loopback) need none, and ipc never
uses them: its files' permissions say who may connect.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.auth

_LOCAL: Final = re.compile(r"^(ipc://|inproc://|tcp://(127\.\d+\.\d+\.\d+|localhost|\[::1\])(:|$))")

_ADDRESS: Final = re.compile(r"^(ipc://.+|tcp://[^*].*:(?P<port>\d+))$")


class KeysMissing(ValueError):
    """An address that others can reach was given without keys, or a key file isn't there."""


class BadAddress(ValueError):
    """What was given as an address is none."""


def is_local(address: str) -> bool:
    """Whether an address can't be reached from another host."""
    return bool(_LOCAL.match(address))


def serve(socket: zmq.Socket[Any], address: str, directory: str) -> None:
    """Prepare a listening socket; before its bind.

    Raises:
        KeysMissing: the address isn't local and there are no keys.
    """
    if not _wants_keys(address, directory):
        return
    public, secret = _load(Path(directory) / "broker.key_secret")
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_server = True


def connect(socket: zmq.Socket[Any], address: str, directory: str) -> None:
    """Prepare a connecting socket; before its connect.

    Raises:
        KeysMissing: the address isn't local and there are no keys.
    """
    if not _wants_keys(address, directory):
        return
    socket.curve_publickey, socket.curve_secretkey = _load(Path(directory) / "own.key_secret")
    socket.curve_serverkey, _ = _load(Path(directory) / "broker.key", secret=False)


def check(address: str, directory: str, setting: str) -> None:
    """Find out at the start, not at the first message, whether the broker may be talked to there.

    Args:
        address: where it is to be.
        directory: of the keys.
        setting: what the address is called where it was set.

    Raises:
        BadAddress: nothing can ever be there, such as at one without a port.
        KeysMissing: the address isn't local and there are no keys.
    """
    advice = f"such as ipc:///run/loadonce/{setting} or tcp://127.0.0.1:5555"
    found = _ADDRESS.match(address)
    if not found or int(found["port"] or 1) not in range(1, 65536):
        raise BadAddress(f"{setting}: {address!r} is no address to connect to, {advice}")
    with zmq.Context() as context, context.socket(zmq.DEALER) as probe:
        probe.linger = 0
        connect(probe, address, directory)
        try:
            probe.connect(address)
        except zmq.ZMQError as problem:
            raise BadAddress(f"{setting}: {address!r}: {problem.strerror}; an address is {advice}") from None


def _wants_keys(address: str, directory: str) -> bool:
    """Whether CURVE is used; the answer is the same on both sides of an address."""
    if not directory and not is_local(address):
        raise KeysMissing(f"{address} can be reached from other hosts: it needs --curve-keys")
    return bool(directory) and not address.startswith(("ipc://", "inproc://"))


def _load(path: Path, *, secret: bool = True) -> tuple[bytes, bytes]:
    try:
        public, private = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as problem:
        raise KeysMissing(f"{path}: {problem}") from None
    if secret and private is None:
        raise KeysMissing(f"{path} holds no secret key")
    return public, private or b""
