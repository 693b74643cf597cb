"""How many cores there are to use, and what must be said when not all of them are."""

import os
from types import SimpleNamespace

import jax
import pytest

from shoal.errors import ShoalError
from shoal.mesh import devices
from shoal.mesh.devices import cores, host_memory, memory, nvidia_present, open_devices


@pytest.fixture
def machine(monkeypatch):
    """A process that may run on 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("200000 100000\n", 2),
        ("max 100000\n", 16),
        ("150000 100000\n", 1),  # one core and a half: a second device would wait for half of its time
        ("50000 100000\n", 1),
        ("6400000 100000\n", 16),  # more than the affinity mask
        ("", 16),
        ("nonsense\n", 16),
    ],
)
def test_a_version_2_quota_is_respected(machine, tmp_path, text, want):
    assert cores(write(tmp_path, cpu_dot_max=text)) == want


@pytest.mark.parametrize(("quota", "want"), [("300000", 3), ("-1", 16), ("10000", 1)])
def test_a_version_1_quota_is_respected(machine, tmp_path, quota, want):
    files = {"cpu__cpu.cfs_quota_us": quota, "cpu__cpu.cfs_period_us": "100000"}
    assert cores(write(tmp_path, **files)) == want


def test_without_a_quota_the_affinity_mask_counts(machine, tmp_path):
    assert cores(tmp_path) == 16


def test_systems_without_affinity_count_all_cores(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert cores(tmp_path) == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores(tmp_path) == 1


MEMINFO = "MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:   5000 kB\n"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"meminfo": MEMINFO}, 5_120_000),
        ({"meminfo": MEMINFO, "memory_dot_max": "max\n"}, 5_120_000),
        ({"meminfo": MEMINFO, "memory_dot_max": "4096\n"}, 4096),
        ({"meminfo": MEMINFO, "memory__memory.limit_in_bytes": "8192\n"}, 8192),
        ({"meminfo": MEMINFO, "memory__memory.limit_in_bytes": "9223372036854771712\n"}, 5_120_000),
        ({"memory_dot_max": "4096\n"}, 4096),
        ({"meminfo": "MemTotal: 1 kB\n"}, 0),
        ({}, 0),
    ],
)
def test_memory_is_what_is_available_cut_by_a_limit(tmp_path, files, want):
    assert host_memory(write(tmp_path, **files), tmp_path / "meminfo") == want


def test_the_memory_of_accelerators_is_added_up_where_all_tell():
    def gpu(stats):
        return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    assert memory([gpu({"bytes_limit": 3}), gpu({"bytes_limit": 4})]) == 7
    assert memory([gpu({"bytes_limit": 3}), gpu(None)]) == 0


def test_when_jax_has_too_few_devices_already_a_note_says_so(monkeypatch):
    jax.devices()
    monkeypatch.setattr(devices, "cores", lambda: 64)
    opened = open_devices()
    assert len(opened.devices) == 8
    assert any("64" in note and "8" in note for note in opened.notes)


def test_when_jax_has_enough_devices_nothing_is_said(monkeypatch):
    jax.devices()
    monkeypatch.setattr(devices, "cores", lambda: 2)
    monkeypatch.setattr(devices, "nvidia_present", lambda: False)
    assert open_devices().notes == ()


def test_fewer_devices_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: 4)
    opened = open_devices("cpu", 3)
    assert (opened.kind, len(opened.devices), opened.notes) == ("cpu", 3, ())


def test_more_devices_than_there_are_is_an_error_with_the_number():
    with pytest.raises(ShoalError, match="the 8 cpu devices") as error:
        open_devices("cpu", 9)
    assert "--devices 8" in error.value.hint


def test_more_devices_than_cores_are_for_tests_and_say_so(monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: 2)
    opened = open_devices("cpu", 5)
    assert len(opened.devices) == 5
    assert opened.notes == ("5 devices on 2 cores: this is slower than 2, for tests only",)


def test_a_negative_number_of_devices_is_refused():
    with pytest.raises(ShoalError, match="--devices -1 must be at least 0"):
        open_devices("cpu", -1)


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_an_accelerator_that_was_asked_for_is_never_replaced_silently(kind):
    with pytest.raises(ShoalError, match=f"--device {kind}"):
        open_devices(kind)


def test_an_unknown_kind_is_named():
    with pytest.raises(ShoalError, match="'cuda'"):
        open_devices("cuda")


def test_a_gpu_that_jax_cannot_use_is_mentioned(monkeypatch):
    monkeypatch.setattr(devices, "nvidia_present", lambda: True)
    assert any("NVIDIA" in note for note in open_devices("auto").notes)
    assert not any("NVIDIA" in note for note in open_devices("cpu").notes)  # the CPU was asked for


def test_an_nvidia_card_is_found_by_its_files(tmp_path):
    assert not nvidia_present(tmp_path)
    assert nvidia_present(write(tmp_path, dev__nvidia0=""))
