"""How busy GPUs are, by a stand-in for NVML."""

import sys
import time
from types import SimpleNamespace

from shoal.app import utilisation
from shoal.app.utilisation import mps_is_on, watched


def test_samples_are_means_over_gpus_and_the_library_is_closed(monkeypatch):
    calls = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=(100, 50)[handle]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(utilisation, "EVERY_S", 0.01)
    with watched("gpu", 2) as samples:
        until = time.monotonic() + 10
        while not samples and time.monotonic() < until:
            time.sleep(0.01)
    assert set(samples) == {0.75}
    assert calls == ["init", "shutdown"]


def test_there_is_nothing_to_see_without_the_library_or_off_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for kind in ("gpu", "cpu"):
        with watched(kind, 1) as samples:
            time.sleep(0.01)
        assert samples == []


def test_mps_is_known_by_its_control_pipe(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_is_on()
    (tmp_path / "control").touch()
    assert mps_is_on()
