"""The broker as a process: it starts, refuses what it can't use in one line, stops, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
import zmq.auth

from broker import curve
from broker import protocol as p
from tests.peers import RawClient
from tests.pool import ROOT, Pool, wait_for

EXIT_USAGE, EXIT_CANNOT_LISTEN = 2, 3


def run_broker(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "broker", *flags],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_with_exit_code_0_and_takes_its_sockets_along(pool: Pool, number: signal.Signals) -> None:
    process = pool.broker()
    process.send_signal(number)
    assert process.wait(10) == 0
    assert not [path.name for path in pool.directory.iterdir() if path.is_socket()]
    events = [json.loads(line)["event"] for line in pool.log("broker").splitlines()]
    assert (events[0], events[-1]) == ("broker_listens", "broker_stopped")


def test_its_sockets_are_private(pool: Pool) -> None:
    pool.broker()
    for name in ("clients", "workers", "admin"):
        assert stat.S_IMODE((pool.directory / name).stat().st_mode) == 0o600


def test_an_ipc_address_of_a_living_broker_is_not_stolen(pool: Pool) -> None:
    pool.broker()
    assert_one_line(run_broker("--run-dir", str(pool.directory)), EXIT_CANNOT_LISTEN, "clients", "taken")
    assert pool.status().pid == pool.processes["broker"].pid, "the first one still answers"


def test_a_taken_port_is_said_in_one_line(pool: Pool) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        done = run_broker("--run-dir", str(pool.directory), "--workers", address)
    assert_one_line(done, EXIT_CANNOT_LISTEN, "workers", address, "taken")
    assert not (pool.directory / "clients").exists(), "what it had bound before is gone again"


def test_sockets_that_a_killed_broker_left_behind_are_used_again(pool: Pool) -> None:
    pool.broker()
    pool.kill("broker")
    assert (pool.directory / "clients").is_socket()
    pool.broker()
    assert pool.status().workers == []


@pytest.mark.parametrize(
    ("flag", "value", "word"),
    [
        ("--queue-limit", "none", "--queue-limit"),
        ("--queue-limit", "0", ">= 1"),
        ("--stall-s", "-1", "--stall-s"),
        ("--log-level", "loud", "--log-level"),
        ("--nonsense", "1", "--nonsense"),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_name(pool: Pool, flag: str, value: str, word: str) -> None:
    assert_one_line(run_broker("--run-dir", str(pool.directory), flag, value), EXIT_USAGE, word)


def test_a_wrong_variable_is_one_line_with_its_name(pool: Pool) -> None:
    done = run_broker("--run-dir", str(pool.directory), LOADONCE_QUEUE_MIB="much")
    assert_one_line(done, EXIT_USAGE, "LOADONCE_QUEUE_MIB")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:notaport", "gopher://x", "tcp://127.0.0.1"])
def test_an_address_that_is_none_is_one_line(pool: Pool, address: str) -> None:
    done = run_broker("--run-dir", str(pool.directory), "--clients", address)
    assert_one_line(done, EXIT_CANNOT_LISTEN, "clients", address)


def test_a_path_in_a_directory_that_is_not_there_is_one_line(pool: Pool) -> None:
    done = run_broker("--run-dir", str(pool.directory), "--admin", f"ipc://{pool.directory}/nowhere/admin")
    assert_one_line(done, EXIT_CANNOT_LISTEN, "nowhere")


def test_a_run_directory_that_others_may_write_into_is_refused(pool: Pool) -> None:
    pool.directory.chmod(0o777)
    assert_one_line(run_broker("--run-dir", str(pool.directory)), EXIT_CANNOT_LISTEN, "chmod 700")


def test_an_address_for_other_hosts_demands_keys(pool: Pool) -> None:
    done = run_broker("--run-dir", str(pool.directory), "--workers", "tcp://0.0.0.0:0")
    assert_one_line(done, EXIT_CANNOT_LISTEN, "tcp://0.0.0.0:0", "--curve-keys")


def test_help_names_every_setting_and_its_default() -> None:
    done = run_broker("--help")
    assert done.returncode == 0
    for flag in ("--clients", "--queue-limit", "--max-attempts", "--curve-keys"):
        assert flag in done.stdout
    assert "LOADONCE_QUEUE_LIMIT" in done.stdout and "10000" in done.stdout


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────


def make_keys(directory: Path) -> tuple[Path, Path]:
    """Keys of a broker and of a peer that it allows."""
    ours, theirs = directory / "broker-keys", directory / "peer-keys"
    (ours / "allowed").mkdir(parents=True)
    theirs.mkdir()
    zmq.auth.create_certificates(ours, "broker")
    public, _ = zmq.auth.create_certificates(theirs, "own")
    (ours / "allowed" / "peer.key").write_bytes(Path(public).read_bytes())
    (theirs / "broker.key").write_bytes((ours / "broker.key").read_bytes())
    return ours, theirs


def answers(address: str, keys: str) -> bool:
    """Whether the broker at an address answers somebody with these keys."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        curve.connect(peer, address, keys)
        peer.connect(address)
        peer.send(p.encode(p.Ping()))
        came = bool(peer.poll(2000))
    context.term()
    return came


def test_with_keys_only_those_allowed_get_an_answer_and_ipc_needs_none(pool: Pool) -> None:
    ours, theirs = make_keys(pool.directory)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    pool.broker("--clients", address, "--curve-keys", str(ours))
    assert answers(address, str(theirs))
    (pool.directory / "strangers").mkdir()
    _, strangers = make_keys(pool.directory / "strangers")
    (strangers / "broker.key").write_bytes((ours / "broker.key").read_bytes())
    assert not answers(address, str(strangers)), "right broker key, own key unknown"
    assert not answers(address, ""), "no keys at all"
    assert pool.status().malformed == 0
    assert pool.stop("broker") == 0


def test_c79_everything_internal_listens_on_files_only(pool: Pool) -> None:
    process = pool.broker()
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir() if fd.is_symlink()}
    inodes = {name.removeprefix("socket:[").removesuffix("]") for name in sockets if "socket:" in name}
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert not [fields for fields in listening if fields[9] in inodes]


def test_c73_it_ends_within_its_linger_though_a_client_does_not_read(pool: Pool) -> None:
    pool.broker()
    with RawClient(pool.clients) as client:
        client.socket.rcvhwm = 1
        for _ in range(5000):
            client.say(p.ListModels())
        wait_for(lambda: pool.status(), "an answer")
        assert pool.stop("broker", timeout_s=5) == 0
