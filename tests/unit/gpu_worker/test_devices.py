"""A device is named in every way that people name it, and has one worker."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.logs import Log
from gpu_worker import devices, serve
from gpu_worker.devices import (
    Claim,
    DeviceError,
    Wish,
    claim,
    parse,
    prepare_environment,
    try_lock,
    wait_for_memory,
)
from gpu_worker.settings import WorkerSettings

LOG = Log("test", stream=io.StringIO())


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("auto", Wish("auto")),
        ("cpu", Wish("cpu")),
        ("0", Wish("index", (0,))),
        ("cuda:1", Wish("index", (1,))),
        ("0,1", Wish("several", (0, 1))),
        ("GPU-8f2b0a9c-1d2e", Wish("uuid", uuid="GPU-8f2b0a9c-1d2e")),
        ("MIG-8f2b0a9c-1d2e", Wish("uuid", uuid="MIG-8f2b0a9c-1d2e")),
    ],
)
def test_every_way_to_name_a_device_is_understood(text: str, wish: Wish) -> None:
    assert parse(text) == wish


@pytest.mark.parametrize("text", ["", "gpu", "cuda", "-1", "0,0", "cuda:x", "1.5"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(DeviceError, match="--device"):
        parse(text)


def test_indices_follow_the_bus_and_a_uuid_is_the_only_device() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    prepare_environment(parse("1"), environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    prepare_environment(parse("GPU-abc"), environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-abc"


def release(claimed: Claim) -> None:
    """What the kernel does when the process that has it ends."""
    for lock in claimed.locks:
        os.close(lock)


class FakeCuda:
    """What torch.cuda shows of two GPUs."""

    def __init__(self, count: int) -> None:
        self.count = count

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"uuid-{index}", name="Card", major=9, minor=0)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 10 * 2**30, 16 * 2**30


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch, "cuda", FakeCuda(2))


@pytest.mark.usefixtures("two_gpus")
def test_c60_a_device_has_one_worker_unless_sharing_is_allowed(tmp_path: Path) -> None:
    first = claim(parse("0"), tmp_path, share=False, log=LOG)
    with pytest.raises(DeviceError, match="has a worker already"):
        claim(parse("cuda:0"), tmp_path, share=False, log=LOG)
    shared = claim(parse("0"), tmp_path, share=True, log=LOG)
    assert shared.torch_name == "cuda:0"
    release(first)
    release(claim(parse("0"), tmp_path, share=False, log=LOG))


@pytest.mark.usefixtures("two_gpus")
def test_auto_takes_the_first_device_that_nobody_has(tmp_path: Path) -> None:
    claims = [claim(Wish("auto"), tmp_path, share=False, log=LOG) for _ in range(2)]
    assert [c.short_name for c in claims] == ["gpu0", "gpu1"]
    with pytest.raises(DeviceError, match="no device is free"):
        claim(Wish("auto"), tmp_path, share=False, log=LOG)
    for c in claims:
        release(c)


@pytest.mark.usefixtures("two_gpus")
def test_one_model_over_two_devices_claims_both_or_none(tmp_path: Path) -> None:
    second = claim(parse("1"), tmp_path, share=False, log=LOG)
    with pytest.raises(DeviceError):
        claim(parse("0,1"), tmp_path, share=False, log=LOG)
    release(second)
    both = claim(parse("0,1"), tmp_path, share=False, log=LOG)
    assert (both.torch_name, both.indices, both.uuid) == ("cuda:0", (0, 1), "uuid-0+uuid-1")
    release(both)


@pytest.mark.usefixtures("two_gpus")
def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="no device 5"):
        claim(parse("5"), tmp_path, share=False, log=LOG)


@pytest.mark.parametrize("visible", ["", "GPU-does-not-exist", "MIG-nothing"])
def test_c57_no_visible_device_is_one_clear_sentence(
    visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(devices, "_visible_gpus", lambda: 0)
    with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES=.*--device cpu"):
        claim(parse("0"), tmp_path, share=False, log=LOG)


def test_cpu_workers_share_the_processor_under_names_of_their_own(tmp_path: Path) -> None:
    claims = [claim(Wish("cpu"), tmp_path, share=False, log=LOG) for _ in range(3)]
    assert [c.short_name for c in claims] == ["cpu0", "cpu1", "cpu2"]
    assert {c.uuid for c in claims} == {""}
    for c in claims:
        release(c)


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "device.lock"
    script = (
        "import os, sys, signal; from pathlib import Path; from gpu_worker.devices import try_lock\n"
        "assert try_lock(Path(sys.argv[1])) is not None; print('locked', flush=True); signal.pause()"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
    assert try_lock(path) is None
    holder.kill()
    holder.communicate()
    lock = try_lock(path)
    assert lock is not None
    os.close(lock)


def test_it_waits_until_a_dead_workers_memory_is_free() -> None:
    answers = iter([(1, 100), (50, 100), (95, 100)])
    assert wait_for_memory(lambda: next(answers), 0.9, 60, LOG)
    assert not wait_for_memory(lambda: (1, 100), 0.9, 0, LOG)


@pytest.mark.parametrize(
    ("indices", "fullest"),
    [((0,), (90, 100)), ((1,), (100, 200)), ((0, 1), (100, 200)), ((2, 0), (90, 100)), ((3, 2, 1), (5, 100))],
)
def test_each_card_of_a_claim_counts_and_no_other(indices: tuple[int, ...], fullest: tuple[int, int]) -> None:
    cards = {0: (90, 100), 1: (100, 200), 2: (95, 100), 3: (5, 100)}
    assert devices.least_free(indices, cards.__getitem__) == fullest


@pytest.mark.parametrize(("device", "waits_for"), [("0", {0}), ("1", {1}), ("0,1", {0, 1}), ("cpu", set())])
@pytest.mark.usefixtures("two_gpus")
def test_a_starting_worker_waits_for_the_memory_of_its_own_cards_alone(
    device: str, waits_for: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    claimed = claim(parse(device), tmp_path, share=False, log=LOG)
    asked: list[int] = []

    def mem_get_info(index: int) -> tuple[int, int]:
        asked.append(index)
        return 15 * 2**30, 16 * 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    threads = torch.get_num_threads()
    try:
        serve._prepare(WorkerSettings(threads=threads), claimed, LOG)
    finally:
        release(claimed)
    assert set(asked) == waits_for


def test_c56_importing_us_and_calling_helpers_touches_no_cuda() -> None:
    script = (
        "import sys, os, broker, broker.client, http_frontend, gpu_worker, gpu_worker.devices as d\n"
        "d.parse('0'); d.prepare_environment(d.parse('0'), os.environ)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
