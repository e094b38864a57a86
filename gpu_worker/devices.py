"""Which device a worker gets, and that no other worker has it. Imports torch only when asked for a GPU.

A device is claimed by a lock on a file in the run directory that the kernel lets go when the process ends,
however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker.logs import Log

_UUID: Final = re.compile(r"^(GPU|MIG)-[0-9A-Za-z/-]+$")
_INDEX: Final = re.compile(r"^(?:cuda:)?(\d+)$")
_SEVERAL: Final = re.compile(r"^\d+(,\d+)+$")
MOST_CPU_WORKERS: Final = 256
FREE_SHARE: Final = 0.9  # of what we may use of a device, before loading
_MIB: Final = 1024 * 1024


class DeviceError(Exception):
    """The device can't be had; one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What ``--device`` says: `kind` is auto, cpu, index, uuid or several."""

    kind: str
    indices: tuple[int, ...] = ()
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A device that is ours while the process lives.

    Attributes:
        torch_name: ``cpu`` or ``cuda:N``.
        short_name: for a worker that has no name: gpu0, cpu0 …
        indices: of the GPUs among the visible ones; empty on a CPU.
        uuids: of the GPUs.
        locks: open descriptors that hold the claim.
    """

    torch_name: str
    short_name: str
    indices: tuple[int, ...] = ()
    uuids: tuple[str, ...] = ()
    locks: tuple[int, ...] = ()

    @property
    def uuid(self) -> str:
        """All UUIDs as one name, for the broker."""
        return "+".join(self.uuids)


def parse(text: str) -> Wish:
    """Read ``--device``.

    Raises:
        DeviceError: it is none of the forms.
    """
    if text in ("auto", "cpu"):
        return Wish(text)
    index = _INDEX.match(text)
    if index:
        return Wish("index", (int(index[1]),))
    if _UUID.match(text):
        return Wish("uuid", uuid=text)
    if _SEVERAL.match(text):
        indices = tuple(map(int, text.split(",")))
        if len(set(indices)) < len(indices):
            raise DeviceError(f"--device {text}: a device is named twice")
        return Wish("several", indices)
    raise DeviceError(f"--device {text}: expected auto, cpu, 0, cuda:1, GPU-…, MIG-… or 0,1")


def prepare_environment(wish: Wish, environ: dict[str, str] | os._Environ[str]) -> None:
    """Set what CUDA and the libraries read when they start; call before torch is imported.

    Indices follow the PCI bus, as nvidia-smi shows them, and a UUID becomes the only visible device.
    """
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    environ.setdefault("TQDM_DISABLE", "1")  # bars are no log lines; loading tells its progress itself
    if wish.kind == "uuid":
        environ["CUDA_VISIBLE_DEVICES"] = wish.uuid
    elif wish.kind == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""


def claim(wish: Wish, directory: Path, *, share: bool, log: Log) -> Claim:
    """Take the device.

    Args:
        wish: what was asked for.
        directory: of the lock files.
        share: another worker on the same device is fine.
        log: gets index, UUID, name and free memory.

    Raises:
        DeviceError: it isn't there, or another worker has it.
    """
    if wish.kind == "cpu" or (wish.kind == "auto" and not _visible_gpus()):
        return _claim_cpu(directory, log)
    count = _visible_gpus()
    if not count:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={seen!r})" if seen is not None else ""
        raise DeviceError(f"no CUDA device is visible{why}: use --device cpu, or check the driver")
    if wish.kind == "auto":
        return _claim_first(range(count), directory, share, log)
    indices = (0,) if wish.kind == "uuid" else wish.indices
    for index in indices:
        if index >= count:
            raise DeviceError(f"there is no device {index}: {count} are visible")
    return _claim_gpus(indices, directory, share, log)


def _claim_cpu(directory: Path, log: Log) -> Claim:
    """CPU workers share the processor; the lock only gives each a number of its own."""
    for number in range(MOST_CPU_WORKERS):
        lock = try_lock(directory / f"device-cpu{number}.lock")
        if lock is not None:
            log.info("device", device="cpu", number=number, cores=len(os.sched_getaffinity(0)))
            return Claim("cpu", f"cpu{number}", locks=(lock,))
    raise DeviceError(f"{MOST_CPU_WORKERS} workers run on this CPU already")


def _claim_first(indices: range, directory: Path, share: bool, log: Log) -> Claim:
    taken = []
    for index in indices:
        try:
            return _claim_gpus((index,), directory, share, log)
        except DeviceError as problem:
            taken.append(str(problem))
    raise DeviceError("no device is free: " + "; ".join(taken))


def _claim_gpus(indices: tuple[int, ...], directory: Path, share: bool, log: Log) -> Claim:
    import torch

    locks: list[int] = []
    uuids: list[str] = []
    for index in indices:
        found = torch.cuda.get_device_properties(index)
        uuid = str(getattr(found, "uuid", "")) or f"index-{index}"
        lock = try_lock(directory / f"device-{uuid}.lock")
        if lock is None and not share:
            for mine in locks:
                os.close(mine)
            raise DeviceError(f"device {index} ({uuid}) has a worker already; --share-device allows two")
        locks += [lock] if lock is not None else []
        uuids.append(uuid)
        free, total = torch.cuda.mem_get_info(index)
        log.info(
            "device", index=index, uuid=uuid, name=found.name, free_mib=free // _MIB, total_mib=total // _MIB,
            capability=f"{found.major}.{found.minor}",
        )  # fmt: skip
    name = "gpu" + "-".join(map(str, indices))
    return Claim(f"cuda:{indices[0]}", name, indices, tuple(uuids), tuple(locks))


def least_free(indices: tuple[int, ...], free_and_total: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
    """Free and total bytes of the one of these devices that has the smallest share of its memory free.

    Args:
        indices: of a claim, at least one; what others do on the rest of the devices is no concern of ours.
        free_and_total: bytes of one device, such as `torch.cuda.mem_get_info`.
    """
    return min(map(free_and_total, indices), key=lambda found: found[0] / found[1])


def wait_for_memory(
    free_and_total: Callable[[], tuple[int, int]], fraction: float, patience_s: float, log: Log
) -> bool:
    """Wait until a device's memory is free, as after a crash whose memory the driver still holds.

    Args:
        free_and_total: bytes, asked again and again; of several devices, those of `least_free`.
        fraction: of the device's memory that we want to use.
        patience_s: how long; afterwards we go on with what there is.
        log: says that we wait, and for what.

    Returns:
        Whether it became free.
    """
    until = time.monotonic() + patience_s
    said = False
    while True:
        free, total = free_and_total()
        if free >= FREE_SHARE * fraction * total:
            return True
        if time.monotonic() >= until:
            log.warning("memory still taken", free_mib=free // _MIB, total_mib=total // _MIB)
            return False
        if not said:
            log.info("waiting for memory", free_mib=free // _MIB, total_mib=total // _MIB)
            said = True
        time.sleep(0.2)


def try_lock(path: Path) -> int | None:
    """Lock a file for as long as this process lives; None if another process has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _visible_gpus() -> int:
    """How many GPUs CUDA shows; asks the driver without starting CUDA where torch can do that."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
