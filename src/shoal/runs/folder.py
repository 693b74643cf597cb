"""The run folder: one training, one folder of plain files, never overwritten and safe to copy.

runs/cartpole-ppo-k3f9/   manifest.json config.toml metrics.jsonl eval.jsonl checkpoints/ policy/
runs/last                 points to the newest run            report.html log.txt

A sweep over shapes is a run of several programs, each a run of its own in `programs/0`, `programs/1`, …
"""

import contextlib
import difflib
import logging
import os
import re
import secrets
import string
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.errors import ShoalError
from shoal.runs import manifest

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: runs go unlocked and are never seen live
    fcntl = None

PARTS = "programs"
Status = Literal["live", "finished", "diverged", "stopped", "damaged"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """Where each file of a run lies; the files themselves may not exist yet."""

    path: Path

    @property
    def name(self) -> str:
        """As `open_run` takes it under its root."""
        above = self.path.parent
        inside = above.name == PARTS and (above.parent / "manifest.json").is_file()
        return "/".join(self.path.parts[-3:]) if inside else self.path.name

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def eval(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def lineage(self) -> Path:
        return self.path / "lineage.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"


def create(root: str | Path, env: str, algo: str, out: str | Path | None = None) -> RunFolder:
    """Make a new run folder `root/env-algo-xxxx`, or exactly `out`, and point `root/last` to it.

    ShoalError if `out` already holds something or the folder cannot be written.
    """
    root = Path(root)
    try:
        path = (
            _make_exactly(Path(out)) if out is not None else _make_named(root, f"{_slug(env)}-{_slug(algo)}")
        )
    except OSError as error:
        where = out if out is not None else root
        raise ShoalError(
            f"Cannot make a run folder in {where}: {error.strerror}",
            "Choose another place with --out FOLDER.",
        ) from error
    with contextlib.suppress(OSError):  # a convenience: a run does not fail for want of it
        root.mkdir(parents=True, exist_ok=True)
        _point_last(root, path)
    return RunFolder(path)


def open_run(spec: str | Path, root: str | Path = "runs") -> RunFolder:
    """The run that `spec` means: `last`, a name under `root`, or a path.

    ShoalError naming the nearest run if there is none.
    """
    root = Path(root)
    for path in places(spec, root):
        if (path / "manifest.json").is_file():
            return RunFolder(path)
    names = [run.name for run in list_runs(root)]
    near = difflib.get_close_matches(Path(spec).name, names, n=1, cutoff=0.4)
    if near:
        hint = f"Did you mean {near[0]}?"
    elif names:
        hint = f"The newest run there is {names[0]}."
    else:
        hint = "There are no runs there yet."
    where = f"at {spec}" if isinstance(spec, Path) else f"{spec!r} in {root}"
    raise ShoalError(f"There is no run {where}", hint)


def places(spec: str | Path, root: str | Path = "runs") -> list[Path]:
    """Where `spec` may lie, the likeliest first: a Path is only itself, and `last` is never `./last`."""
    root = Path(root)
    if isinstance(spec, Path):
        return [spec]
    if Path(spec).name != spec:
        return [Path(spec), root / spec]
    if spec == "last":
        return [path] if (path := _last(root)) else []
    return [root / spec, Path(spec)]


def parts(run: RunFolder) -> list[RunFolder]:
    """The runs that a sweep over shapes consists of, in order; none where a run is a single program."""
    found = [path.parent for path in (run.path / PARTS).glob("[0-9]*/manifest.json")]
    return [RunFolder(path) for path in sorted(found, key=lambda path: int(path.name))]


def list_runs(root: str | Path = "runs") -> list[RunFolder]:
    """The runs directly under `root`, newest first, damaged ones last.

    A folder is a run once it has a manifest.
    """
    found = {}
    for path in Path(root).glob("*/manifest.json"):
        if not path.parent.is_symlink():
            run = RunFolder(path.parent)
            found[run] = ""
            with contextlib.suppress(ShoalError):
                found[run] = str(manifest.read_object(path).get("started"))
    return sorted(found, key=lambda run: (found[run], run.name), reverse=True)


def size_bytes(path: Path) -> int:
    """Bytes of all files under `path`, also while it is being written to."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


@contextlib.contextmanager
def lock(folder: RunFolder) -> Iterator[None]:
    """Hold the run for this process alone; the system frees it however the process ends.

    ShoalError if another process trains in the folder.
    """
    with open(folder.path / ".lock", "a") as file:
        for _ in range(10):  # whoever asks for the status holds the lock for an instant
            if _take(file):
                break
            time.sleep(0.02)
        else:
            raise ShoalError(
                f"Another process is training in {folder.path}", "Wait for it, stop it, or start a new run."
            )
        yield


def status(folder: RunFolder) -> Status:
    """Live while a process holds the lock; else what the manifest says, if it can be read.

    A run that finished without an agent left is `diverged`.
    """
    with contextlib.suppress(OSError), open(folder.path / ".lock") as file:
        if not _take(file):
            return "live"
    try:
        facts = manifest.read_object(folder.manifest)
        if not facts.get("finished"):
            return "stopped"
        with manifest.reading(folder.manifest):
            return "diverged" if (facts.get("result") or {}).get("alive") == 0 else "finished"
    except ShoalError:
        return "damaged"


def _take(file: Any) -> bool:
    """Lock an open file, without waiting, until it is closed; whether that worked."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _slug(text: str) -> str:
    """What of an env or algorithm spec can stand in a file name: `gymnasium:Ant-v5` → `gymnasium-Ant-v5`."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")[-60:] or "x"


def _make_named(root: Path, stem: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    while True:
        suffix = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(4))
        path = root / f"{stem}-{suffix}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(exist_ok=False)  # exclusive: of two runs started together, one takes another name
            return path


def _make_exactly(path: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        path.mkdir(parents=True, exist_ok=False)
    if not path.is_dir() or any(path.iterdir()):
        raise ShoalError(
            f"{path} exists and is not an empty folder; a run never overwrites anything",
            "Choose another --out, or resume the run that is there.",
        )
    return path


def _point_last(root: Path, path: Path) -> None:
    """Replace `root/last` in one step; where links cannot be made, by a text file."""
    target = os.path.relpath(path, root)  # relative: still right after `runs/` is moved or copied
    temporary = root / f".last-{secrets.token_hex(4)}"
    try:
        temporary.symlink_to(target, target_is_directory=True)
    except (OSError, NotImplementedError):
        temporary.write_text(target, "utf-8")
    os.replace(temporary, root / "last")


def _last(root: Path) -> Path | None:
    link = root / "last"
    if link.is_symlink():
        return root / os.readlink(link)
    return root / link.read_text("utf-8").strip() if link.is_file() else None
