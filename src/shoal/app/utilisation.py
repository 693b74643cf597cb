"""How busy accelerators are, where NVIDIA's library can be asked: `pip install nvidia-ml-py` is `pynvml`."""

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EVERY_S = 0.2  # NVML's own numbers are means over a sixth of a second or more
MPS_PIPES = Path("/tmp/nvidia-mps")


@contextlib.contextmanager
def watched(kind: str, devices: int) -> Iterator[list[float]]:
    """Shares of the time that kernels ran on the first `devices` GPUs, sampled while the context is open."""
    samples: list[float] = []
    nvml = _nvml() if kind == "gpu" else None
    if nvml is None:
        yield samples
        return
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(devices)]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(EVERY_S):
            samples.append(float(np.mean([nvml.nvmlDeviceGetUtilizationRates(h).gpu for h in handles])) / 100)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        nvml.nvmlShutdown()


def mps_is_on() -> bool:
    """Whether processes share GPUs through NVIDIA's MPS, as its environment or its control pipe tell."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPES)
    return (Path(folder) / "control").exists()


def _nvml() -> Any:
    """The library, started; None where it is not installed or finds no driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml
    except Exception:  # its own kinds of errors, one per code
        return None
