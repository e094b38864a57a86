"""Who needs keys, and that both sides agree about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
import zmq.auth

from broker import curve

LOCAL = [
    "ipc:///x",
    "inproc://x",
    "tcp://127.0.0.1:5",
    "tcp://127.9.9.9:5",
    "tcp://localhost:5",
    "tcp://[::1]:5",
]
FAR = [
    "tcp://*:5",
    "tcp://0.0.0.0:5",
    "tcp://10.0.0.1:5",
    "tcp://127.0.0.1.example:5",
    "tcp://eth0:5",
    "udp://x",
]


@pytest.mark.parametrize("address", LOCAL)
def test_addresses_of_this_host_need_no_keys(address: str) -> None:
    assert curve.is_local(address)


@pytest.mark.parametrize("address", FAR)
def test_any_other_address_demands_keys(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        for prepare in (curve.serve, curve.connect):
            with pytest.raises(curve.KeysMissing, match="curve-keys"):
                prepare(socket, address, "")


def test_a_directory_without_keys_is_named(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        with pytest.raises(curve.KeysMissing, match=r"broker\.key_secret"):
            curve.serve(socket, "tcp://0.0.0.0:5", str(tmp_path))
        with pytest.raises(curve.KeysMissing, match=r"own\.key_secret"):
            curve.connect(socket, "tcp://10.0.0.1:5", str(tmp_path))


def test_a_public_key_in_place_of_a_secret_one_is_refused(tmp_path: Path) -> None:
    public, _ = zmq.auth.create_certificates(tmp_path, "broker")
    Path(public).rename(tmp_path / "broker.key_secret")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, pytest.raises(curve.KeysMissing):
        curve.serve(socket, "tcp://0.0.0.0:5", str(tmp_path))


def test_ipc_never_uses_keys_on_either_side(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        curve.serve(socket, "ipc:///x", str(tmp_path))
        curve.connect(socket, "ipc:///x", str(tmp_path))
