import json
import time

import pytest

from shoal.app import doctor
from shoal.app.main import main
from shoal.mesh.devices import memory_limit

CUDA12, CUDA13 = {"jax-cuda12-plugin": "0.10.2"}, {"jax-cuda13-plugin": "0.10.2"}
FOUND = dict(kind="cpu", device="cpu", devices=1, opened_s=0.1)


@pytest.mark.parametrize(
    ("row", "status", "said"),
    [
        (doctor.check_python((3, 10, 4)), "fail", "3.10.4"),
        (doctor.check_python((3, 11, 0)), "ok", "3.11.0"),
        (doctor.check_versions("0.10.2", "0.10.2", {}), "ok", "0.10.2"),
        (doctor.check_versions("0.10.2", "0.9.1", {}), "fail", "'jax==0.10.2'"),
        (doctor.check_versions("0.11.0", "0.11.0", CUDA12), "fail", "'jax[cuda12]==0.11.0'"),
        (doctor.check_versions("0.4.30", "0.4.30", {}), "fail", "'jax>=0.10'"),
        (doctor.check_versions("0.10.2", "missing", {}), "fail", "missing"),
        (doctor.check_driver("NVIDIA H200, 570.86.15\n", "", CUDA12), "ok", "H200"),
        (doctor.check_driver("NVIDIA H200, 570.86.15\n", "", CUDA13), "fail", "pip install 'shoal[cuda12]'"),
        (doctor.check_driver("Tesla K80, 470.57\n", "", {}), "fail", "525"),
        (
            doctor.check_driver("", "Failed to initialize NVML: Driver/library version mismatch", {}),
            "fail",
            "reboot",
        ),
        (doctor.check_driver("", "nvidia-smi: No such file or directory", {}), "warn", "No such file"),
        (doctor.check_device(FOUND, "", card=False), "ok", "1 cpu"),
        (doctor.check_device(FOUND, "", card=True), "fail", "pip install 'shoal[cuda12]'"),
        (doctor.check_device(None, "no answer in 90 s", card=True), "fail", "nvidia-smi"),
        (doctor.check_ffmpeg(None), "warn", "GIF"),
        (doctor.check_cpu(2, 64), "ok", "2 of 64"),
        (doctor.check_memory(None, 16e9), "ok", "16 GB"),
        (doctor.check_memory(10**9, 16e9), "warn", "1 GB by the container's limit"),
    ],
)
def test_each_finding_has_its_status_and_its_fix(row, status, said):
    assert row.status == status
    assert said in f"{row.text} {row.fix}"
    assert bool(row.fix) == (status != "ok")


def test_an_unwritable_cache_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    assert doctor.check_cache(tmp_path / "file" / "jax").status == "warn"
    assert doctor.check_cache(tmp_path / "new" / "jax").status == "ok"


@pytest.mark.parametrize(
    ("files", "limit"),
    [({"memory.max": "1000\n"}, 1000), ({"memory.max": "max\n"}, None), ({}, None)],
)
def test_the_containers_limit_is_read(tmp_path, files, limit):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert memory_limit(tmp_path) == limit


def test_the_older_kind_of_limit_is_read(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2000\n")
    assert memory_limit(tmp_path) == 2000


def test_a_hanging_driver_cannot_hang_the_doctor(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = time.perf_counter()
    assert doctor.run_probe(0.5, "hangs") == (None, "no answer in 0.5 s")
    assert time.perf_counter() - started < 10


def test_the_exit_code_says_whether_something_must_be_fixed(monkeypatch, capsys):
    rows = [doctor.Row("a", "ok", "fine"), doctor.Row("b", "warn", "so so", "do this")]
    monkeypatch.setattr(doctor, "checks", lambda root: iter(rows))
    assert main(["doctor"]) == 0
    rows.append(doctor.Row("c", "fail", "broken", "do that"))
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["ok"], found["rows"][2]["fix"]) == (False, "do that")


def test_this_machine_is_probed(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found, error = doctor.run_probe()
    assert error == ""
    assert found["kind"] == "cpu"
    assert set(found["matmul"]) == {"float32", "bfloat16", "float16"}
    assert all(row.status == "ok" for row in doctor.check_rates(found))
