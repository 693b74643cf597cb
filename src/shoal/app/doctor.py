"""The verb `doctor`: is this machine ready? Every problem comes with the line that fixes it."""

import contextlib
import json as jsons
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from shoal.app import text

PROBE_SECONDS = 90.0  # a driver that takes longer hangs
LEAST_DRIVER = {"cuda12": 525, "cuda13": 580}  # NVIDIA driver series that each CUDA needs
LOW_DISK, LOW_MEMORY = 5e9, 2e9  # bytes


class Row(NamedTuple):
    name: str
    status: str  # ok, warn or fail
    text: str
    fix: str = ""


def doctor(
    root: str = "runs",  # the folder of run folders
    json: bool = False,  # end stdout with one line of JSON
) -> int:
    """Check this machine: exit code 1 if something must be fixed."""
    rows = []
    for row in checks(Path(root)):
        rows.append(row)
        if not json:
            print(
                f"{row.status:4}  {row.name:9}  {row.text}" + (f"\n{'':17}fix: {row.fix}" if row.fix else ""),
                flush=True,
            )
    ok = all(row.status != "fail" for row in rows)
    if json:
        print(text.json_line({"ok": ok, "rows": [row._asdict() for row in rows]}))
    return 0 if ok else 1


def checks(root: Path) -> Iterator[Row]:
    """All rows, in the order in which problems explain one another."""
    yield check_python(sys.version_info[:3])
    yield check_versions(_version("jax"), _version("jaxlib"), _plugins())
    try:
        from shoal.mesh.devices import cores, memory_limit, nvidia_present
    except Exception as broken:
        yield check_device(None, f"{type(broken).__name__}: {broken}", card=False)
        return
    card = nvidia_present()
    if card:
        yield check_driver(
            *_run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]), _plugins()
        )
    found, error = run_probe()
    yield check_device(found, error, card)
    if found:
        yield from check_rates(found)
        yield check_cache(Path(found["cache"]))
    yield check_ffmpeg(shutil.which("ffmpeg"))
    yield check_cpu(cores(), os.cpu_count() or 1)
    yield check_memory(memory_limit(), _memory())
    yield check_disk(root)


def check_python(found: tuple[int, ...]) -> Row:
    words = f"Python {'.'.join(map(str, found))}, {platform.system()} {platform.machine()}"
    if found < (3, 11):
        return Row("python", "fail", f"{words}: too old", "python3.11 -m venv .venv")
    return Row("python", "ok", words)


def check_versions(jax: str, jaxlib: str, plugins: dict[str, str]) -> Row:
    """jax, jaxlib and the CUDA plugin come in step: a mix fails in ways that do not name it."""
    words = ", ".join(f"{name} {found}" for name, found in {"jax": jax, "jaxlib": jaxlib, **plugins}.items())
    extra = next((f"[{name.split('-')[1]}]" for name in plugins), "")
    fix = f"pip install --upgrade 'jax{extra}=={jax}'"
    if _series(jax) < (0, 10):
        return Row(
            "jax",
            "fail",
            f"{words}: shoal needs jax 0.10 or newer",
            f"pip install --upgrade 'jax{extra}>=0.10'",
        )
    if any(_series(found) != _series(jax) for found in (jaxlib, *plugins.values())):
        return Row("jax", "fail", f"{words}: these do not belong together", fix)
    return Row("jax", "ok", words)


def check_driver(output: str, error: str, plugins: dict[str, str]) -> Row:
    """The NVIDIA driver, from what nvidia-smi says."""
    said = (output + error).strip()
    if "mismatch" in said:
        return Row(
            "driver", "fail", said.splitlines()[0], "reboot: the driver was updated under a running system"
        )
    if not (match := re.search(r"(\d+)\.[\d.]+\s*$", output)):
        words = said.splitlines()[0] if said else "nvidia-smi says nothing"
        return Row(
            "driver",
            "warn",
            f"an NVIDIA card is there, but {words}",
            "install the NVIDIA driver's nvidia-smi",
        )
    cuda = next((name for plugin in plugins for name in LEAST_DRIVER if name in plugin), "cuda12")
    if int(match[1]) < LEAST_DRIVER[cuda]:
        words = f"driver {match[1]} is too old for {cuda}, which needs {LEAST_DRIVER[cuda]}"
        return Row(
            "driver",
            "fail",
            words,
            "update the NVIDIA driver" + (": or pip install 'shoal[cuda12]'" if cuda == "cuda13" else ""),
        )
    return Row("driver", "ok", output.strip().splitlines()[0])


def check_device(found: dict[str, Any] | None, error: str, card: bool) -> Row:
    if found is None:
        hint = (
            "nvidia-smi shows who holds the card; JAX_PLATFORMS=cpu does without it"
            if card
            else "pip install --upgrade jax jaxlib"
        )
        return Row("device", "fail", f"JAX opens no device: {error}", hint)
    words = f"{found['devices']} {found['kind']} ({found['device']}), in {text.duration(found['opened_s'])}"
    if card and found["kind"] == "cpu":
        return Row("device", "fail", f"{words}; the NVIDIA card is not used", "pip install 'shoal[cuda12]'")
    return Row("device", "ok", words)


def check_rates(found: dict[str, Any]) -> Iterator[Row]:
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in found["matmul"].items())
    yield Row("matmul", "ok", f"GFLOP/s: {rates}")
    yield Row("memory", "ok", f"{found['memory']:,.0f} GB/s, read and written")
    yield Row("precision", "ok", f"shoal multiplies float32 at precision {found['precision']!r}")


def check_cache(folder: Path) -> Row:
    """The compile cache: a broken one only costs time."""
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        return Row(
            "cache",
            "warn",
            f"compiled programs cannot be kept in {folder}",
            "export JAX_COMPILATION_CACHE_DIR=/a/writable/folder",
        )
    from shoal.runs.folder import size_bytes

    return Row("cache", "ok", f"compiled programs are kept in {folder} ({text.size(size_bytes(folder))})")


def check_ffmpeg(path: str | None) -> Row:
    if path is None:
        return Row(
            "ffmpeg",
            "warn",
            "not found: videos are written as GIF",
            "apt install ffmpeg, or brew install ffmpeg",
        )
    return Row("ffmpeg", "ok", path)


def check_cpu(usable: int, there: int) -> Row:
    words = f"{usable} of {there} cores may be used (affinity, container quota)"
    return Row("cpu", "ok", words if usable < there else f"{there} cores")


def check_memory(limit: int | None, total: int) -> Row:
    words = f"{text.size(total)} in the machine"
    if limit is not None and limit < total:
        words = f"{text.size(limit)} by the container's limit; {words}"
    if min(limit or total, total) < LOW_MEMORY:
        return Row("ram", "warn", f"{words}: little", f"give the container at least {text.size(LOW_MEMORY)}")
    return Row("ram", "ok", words)


def check_disk(root: Path) -> Row:
    above = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    words = f"{text.size(free)} free for {root}/"
    if not os.access(above, os.W_OK):
        return Row(
            "disk", "fail", f"{above} cannot be written to", "choose another folder with --root or --out"
        )
    if free < LOW_DISK:
        return Row(
            "disk", "warn", words, "shoal runs lists runs with their sizes; shoal runs rm removes them"
        )
    return Row("disk", "ok", words)


# --- Asking the machine -----------------------------------------------------------------------


def run_probe(
    seconds: float = PROBE_SECONDS, module: str = "shoal.app.probe"
) -> tuple[dict[str, Any] | None, str]:
    """What `probe` found, or why it did not: an error, or no answer in time."""
    output, error = _run([sys.executable, "-m", module], seconds)
    try:
        return jsons.loads(output.strip().splitlines()[-1]), ""
    except (ValueError, IndexError):
        return None, error.strip().splitlines()[-1] if error.strip() else "no output"


def _run(command: list[str], seconds: float = 20.0) -> tuple[str, str]:
    """Output and error of a command; never waits longer, not even for a process that cannot be killed."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return "", f"no answer in {seconds:g} s"


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _plugins() -> dict[str, str]:
    names = ("jax-cuda12-plugin", "jax-cuda13-plugin")
    return {name: found for name in names if (found := _version(name)) != "missing"}


def _series(version: str) -> tuple[int, ...]:
    """(0, 10) of 0.10.2: what must agree."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
