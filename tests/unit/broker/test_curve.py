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


BAD = ["", "foo", "ipc://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:0", "tcp://127.0.0.1:70000",
       "tcp://127.0.0.1:http", "tcp://*:5555", "http://127.0.0.1:80", "ipc://" + "x" * 200]  # fmt: skip


@pytest.mark.parametrize("address", BAD)
def test_what_can_not_be_connected_to_is_found_out_at_once_and_its_setting_named(address: str) -> None:
    with pytest.raises(curve.BadAddress, match="^workers: "):
        curve.check(address, "", "workers")


@pytest.mark.parametrize("address", ["ipc:///tmp/nobody-listens", "tcp://127.0.0.1:1", "tcp://[::1]:65535"])
def test_a_good_address_passes_whether_or_not_somebody_is_there(address: str) -> None:
    curve.check(address, "", "clients")


def test_an_address_for_other_hosts_needs_its_keys_at_once() -> None:
    with pytest.raises(curve.KeysMissing, match="curve-keys"):
        curve.check("tcp://192.0.2.1:5555", "", "workers")
