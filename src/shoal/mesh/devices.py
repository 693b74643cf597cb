"""Which devices a run uses, and how precisely: one XLA device per CPU core, or the accelerators there are."""

import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax

from shoal.errors import ShoalError

MATMUL_PRECISION = "highest"  # float32 means float32, on GPUs (TF32) and TPUs (bfloat16) too

CGROUP = pathlib.Path("/sys/fs/cgroup")
MEMINFO = pathlib.Path("/proc/meminfo")


class Devices(NamedTuple):
    kind: str  # cpu, gpu or tpu
    devices: tuple[jax.Device, ...]
    notes: tuple[str, ...]  # what must not go unsaid: one line each


def cores(cgroup: pathlib.Path = CGROUP) -> int:
    """CPU cores this process may use: its affinity mask, cut by a container's quota (cgroup v2, v1)."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for quota, period in (_quota_v2(cgroup), _quota_v1(cgroup)):
        if quota > 0 and period > 0:
            count = min(count, max(1, quota // period))
    return count


def _quota_v2(cgroup: pathlib.Path) -> tuple[int, int]:
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return int(quota), int(period)
    except (OSError, ValueError):  # no such file, or "max": no quota
        return 0, 0


def _quota_v1(cgroup: pathlib.Path) -> tuple[int, int]:
    try:
        read = lambda name: int((cgroup / "cpu" / name).read_text())
        return read("cpu.cfs_quota_us"), read("cpu.cfs_period_us")
    except (OSError, ValueError):
        return 0, 0


def memory(devices: Sequence[jax.Device]) -> int:
    """Bytes that a program may take on these devices together; 0 where nothing tells."""
    if devices[0].platform == "cpu":
        return host_memory()
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    return sum(limits) if all(limits) else 0


def host_memory(cgroup: pathlib.Path = CGROUP, meminfo: pathlib.Path = MEMINFO) -> int:
    """Bytes available on this machine, cut by a container's limit (cgroup v2, v1); 0 where nothing tells."""
    limits = memory_limit(cgroup), _first_number(meminfo, "MemAvailable:") * 1024
    return min((limit for limit in limits if limit), default=0)


def memory_limit(cgroup: pathlib.Path = CGROUP) -> int | None:
    """Bytes a container may use (cgroup v2, v1); None without a limit."""
    files = "memory.max", "memory/memory.limit_in_bytes"
    return min((limit for name in files if (limit := _first_number(cgroup / name)) > 0), default=None)


def _first_number(path: pathlib.Path, after: str = "") -> int:
    """The number that a file starts with, or that follows a word in it; 0 where there is none."""
    try:
        return int(path.read_text().partition(after)[2].split()[0] if after else path.read_text())
    except (OSError, ValueError, IndexError):  # no such file, or "max": no limit
        return 0


def nvidia_present(root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Whether this machine shows an NVIDIA card, whatever JAX can use."""
    return (root / "dev/nvidia0").exists() or (root / "proc/driver/nvidia/version").exists()


def open_devices(kind: str = "auto", count: int = 0) -> Devices:
    """The devices of a run; starts JAX's backend. count 0 = all there are.

    On a CPU, where one program hardly uses a second core, there is one XLA device per core: agents are
    sharded over them. That must be set before JAX starts; when it is too late, a note says so.
    """
    notes: list[str] = []
    if kind not in ("auto", "cpu", "gpu", "tpu"):
        raise ShoalError(f"no kind of device is called {kind!r}", "use auto, cpu, gpu or tpu")
    if count < 0:
        raise ShoalError(f"--devices {count} must be at least 0", "0 = all there are")
    have = cores()
    wanted = max(count, have)
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        if len(jax.devices("cpu")) < wanted:
            notes.append(
                f"JAX had started before Shoal could ask for {wanted} CPU devices, so this run has "
                f"{len(jax.devices('cpu'))}: call shoal.train before any JAX work to use every core"
            )
    devices = _devices(kind)
    found = devices[0].platform
    if found == "cpu" and kind == "auto" and nvidia_present():
        notes.append(
            "there is an NVIDIA GPU, but JAX cannot use it, so this runs on the CPU: "
            "pip install 'shoal[cuda12]'"
        )
    if count > len(devices):
        raise ShoalError(
            f"--devices {count} asks for more than the {len(devices)} {found} devices there are",
            f"use --devices {len(devices)}, or leave it out to use all",
        )
    if found == "cpu" and count > have:
        notes.append(f"{count} devices on {have} cores: this is slower than {have}, for tests only")
    return Devices(found, tuple(devices[: count or len(devices)]), tuple(notes))


def _devices(kind: str) -> list[jax.Device]:
    try:
        return jax.devices(None if kind == "auto" else kind)
    except RuntimeError as error:
        extra = {"gpu": "cuda12", "tpu": "tpu"}.get(kind, "")
        hint = f"pip install 'shoal[{extra}]', then run shoal doctor" if extra else "run shoal doctor"
        raise ShoalError(f"--device {kind}, but JAX sees no such device", hint) from error
