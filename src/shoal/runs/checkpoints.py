"""Checkpoints: the whole train state, so that a run continues bit for bit after any interruption.

A checkpoint is one folder `checkpoints/<updates>/`, complete or absent: arrays by Orbax, `state.json`
(every leaf's path, dtype and shape, and the caller's meta), `seal.json` (size and CRC-32 of every file).
Orbax gets a flat dict of host arrays: the structure comes from the program that restores, which refuses
what does not fit it leaf by leaf, and the devices may differ.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from shoal.errors import ShoalError
from shoal.runs.manifest import read_object, reading, write_atomic

Tree = Any  # a pytree of jax arrays; None and empty nodes are structure
PIECE_BYTES = 2**24
SECONDS_OF_ECHO = 1.0  # that the writers of a failed save go on for
OTHER = "It is of another program or other sizes: resume with the run's own config.toml and version."

_log = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints in the background, one at a time, while the loop goes on.

    A write that failed (a full disk) costs that checkpoint and one warning, and leaves the older ones as
    they were; if it was the last one, `wait` and leaving the `with` block raise a ShoalError.
    """

    def __init__(self, folder: Path, last: int = 3):
        self._folder = folder
        self._last = last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Exception | None] | None = None
        self._warned = False

    def save(self, step: int, state: Tree, meta: dict[str, Any], protect: Set[int] = frozenset()) -> None:
        """Copy `state` (its buffers may be donated as soon as this returns) and start writing it as `step`.

        Once it is complete, older ones go but for the newest `last` and those in `protect`.
        """
        if self._pending is not None:
            self._pending.result()
        copied = _copy(state)
        self._pending = self._thread.submit(self._write, step, copied, meta, protect)

    def wait(self) -> None:
        """Return once the last save is complete and synced; ShoalError if it could not be written.

        Interrupted, it can be called again.
        """
        if self._pending is None:
            return
        error = self._pending.result()
        self._pending = None
        if error is not None:
            raise ShoalError(
                f"Cannot write a checkpoint to {self._folder}: {_reason(error)}",
                f"Free space, then shoal resume {self._folder.parent}",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True)
        self.wait()

    def _write(self, step: int, copied: "_Copy", meta: dict[str, Any], protect: Set[int]) -> Exception | None:
        try:
            _write(self._folder, step, copied, meta)
            keep(self._folder, self._last, protect)
        except Exception as error:  # of Orbax's, too: it has its own for a full disk
            shutil.rmtree(self._folder / f"tmp-{step}", ignore_errors=True)
            if not self._warned:
                _log.warning(
                    "Cannot write checkpoint %d, training goes on: %s: %s", step, self._folder, _reason(error)
                )
            self._warned = True
            return error
        return None


def save(folder: Path, step: int, state: Tree, meta: dict[str, Any]) -> None:
    """Write `state` and `meta` (JSON) as checkpoint `step` (= updates); complete and synced on return.

    Killed at any moment, it leaves every earlier checkpoint as it was. The caller holds the run's lock.
    """
    _write(folder, step, _copy(state), meta)


def restore(
    folder: Path, like: Tree, step: int | None = None, meta: Collection[str] | None = None
) -> tuple[Tree, dict[str, Any]]:
    """The state and meta of `step`, or of the newest undamaged checkpoint.

    `like` is a pytree of ShapeDtypeStructs (or arrays) that gives structure, shapes, dtypes and
    shardings; devices may differ from those it was saved on. ShoalError if there is no checkpoint, if
    `step` is damaged, or if any leaf is missing, left over, or of another shape or dtype; likewise if
    the meta's names are not exactly those of `meta`, where given.
    """
    if step is None:
        step = _newest(folder)
    elif step not in steps(folder):
        raise ShoalError(f"There is no checkpoint {step} in {folder}", f"There are: {steps(folder)}")
    elif damage := _damage(_place(folder, step)):
        raise ShoalError(f"Checkpoint {step} in {folder} is damaged: {damage}", f"There are: {steps(folder)}")
    place = _place(folder, step)
    record = read_object(place / "state.json", "leaves", "meta")
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in paths_and_leaves}
    with reading(place / "state.json"):
        _check_fits(place, record["leaves"], wanted)
        if meta is not None and (odd := set(meta) ^ set(record["meta"])):
            raise ShoalError(f"{place} does not fit: its meta differs in {', '.join(sorted(odd))}", OTHER)
    arrays = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in wanted.items() if not leaf.size}
    if len(arrays) < len(wanted):
        with _orbax() as ocp:
            arrays |= ocp.PyTreeCheckpointer().restore((place / "arrays").absolute())
    keys = {path: record["leaves"][path].get("key") for path in wanted}
    restored = [_put(arrays[path], leaf, keys[path]) for path, leaf in wanted.items()]
    return jax.tree.unflatten(structure, restored), record["meta"]


def leaves(folder: Path) -> tuple[int, dict[str, tuple[str, tuple[int, ...]]]]:
    """The newest undamaged checkpoint, and dtype and shape of every array in it by its path."""
    step = _newest(folder)
    path = _place(folder, step) / "state.json"
    record = read_object(path, "leaves", "meta")["leaves"]
    with reading(path):
        return step, {name: (leaf["dtype"], tuple(leaf["shape"])) for name, leaf in record.items()}


def read(folder: Path, step: int, paths: Collection[str]) -> dict[str, np.ndarray]:
    """Only these arrays of a checkpoint, whatever program it is of; none may be a PRNG key."""
    with _orbax() as ocp:
        each = dict.fromkeys(paths, ocp.RestoreArgs(restore_type=np.ndarray))
        some = ocp.args.PyTreeRestore(dict.fromkeys(paths, 0), restore_args=each, partial_restore=True)
        found = ocp.PyTreeCheckpointer().restore((_place(folder, step) / "arrays").absolute(), args=some)
    return {path: np.asarray(found[path]) for path in paths}


def steps(folder: Path) -> list[int]:
    """The checkpoints in `folder`, oldest first. They are complete; only `restore` looks for damage."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir()]
    return sorted({int(name.split(".")[0]) for name in names if re.fullmatch(r"\d+(\.old)?", name)})


def keep(folder: Path, last: int = 3, protect: Set[int] = frozenset()) -> None:
    """Delete all but the newest `last` checkpoints and those in `protect`.

    One with missing or cut files does not count as one of the `last`.
    """
    whole = [step for step in steps(folder) if not _damage(_place(folder, step), quick=True)]
    newest = whole[-last:]
    for step in steps(folder):
        if newest and step < newest[-1] and step not in newest and step not in protect:
            _delete(_place(folder, step))


class _Copy(NamedTuple):
    """A state on the host, sharing no memory with it."""

    arrays: dict[str, np.ndarray]
    leaves: dict[str, dict[str, Any]]  # path -> {dtype, shape, and for a PRNG key its implementation}


def _copy(state: Tree) -> _Copy:
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    records, data = {}, {}
    for path, leaf in leaves.items():
        records[path] = {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
        data[path] = leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            records[path]["key"] = str(jax.random.key_impl(leaf))
            data[path] = jax.random.key_data(leaf)
    # device_get overlaps the transfers, but on CPU it returns views of the buffers: hence the copy
    arrays = {path: np.array(array) for path, array in jax.device_get(data).items()}
    return _Copy({path: array for path, array in arrays.items() if array.size}, records)  # Orbax: none empty


def _put(array: np.ndarray, like: Any, key: str | None) -> jax.Array:
    leaf = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=key) if key else array
    restored = jax.device_put(leaf, getattr(like, "sharding", None))
    assert restored.dtype == like.dtype, f"{like.dtype} became {restored.dtype}: is jax_enable_x64 off?"
    return restored


def _write(folder: Path, step: int, copied: _Copy, meta: dict[str, Any]) -> None:
    """Write beside, seal, then rename into place: the rename is what makes it a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("tmp-*"):  # of a killed save or deletion; the run's lock says it is ours
        shutil.rmtree(leftover)
    temporary, place, old = folder / f"tmp-{step}", folder / f"{step}", folder / f"{step}.old"
    temporary.mkdir()
    if sum(array.nbytes for array in copied.arrays.values()) > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # before Orbax finds out halfway
    if copied.arrays:
        with _orbax() as ocp:
            # In pieces: whole, a large array would be held several times over while it is packed or unpacked.
            pieces = {path: ocp.SaveArgs(chunk_byte_size=PIECE_BYTES) for path in copied.arrays}
            target = (temporary / "arrays").absolute()
            ocp.PyTreeCheckpointer().save(target, copied.arrays, save_args=pieces)
    record = {"leaves": copied.leaves, "meta": meta}  # not strict JSON: an infinity comes back as one
    write_atomic(temporary / "state.json", json.dumps(record, indent=1, default=np.generic.item))
    write_atomic(temporary / "seal.json", json.dumps(_seal(temporary)))
    _sync(temporary)
    if place.exists():  # `steps` and `restore` know the second name, so the old one is never out of reach
        if old.exists():
            _delete(old)
        place.rename(old)
    temporary.rename(place)
    _sync(folder)
    if old.exists():
        _delete(old)


def _place(folder: Path, step: int) -> Path:
    return folder / f"{step}" if (folder / f"{step}").is_dir() else folder / f"{step}.old"


def _delete(place: Path) -> None:
    """Make a checkpoint vanish in one step, then free its space."""
    doomed = place.with_name(f"tmp-{place.name}-{secrets.token_hex(4)}")
    place.rename(doomed)
    shutil.rmtree(doomed)


def _newest(folder: Path) -> int:
    for unfinished in sorted(folder.glob("tmp-*")):
        _log.info("Ignoring %s: it was never completed", unfinished)
    for step in reversed(steps(folder)):
        damage = _damage(_place(folder, step))
        if not damage:
            return step
        _log.warning("Checkpoint %s is damaged (%s): using the one before it", _place(folder, step), damage)
    raise ShoalError(f"There is no usable checkpoint in {folder}", "Start a new run.")


def _seal(place: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file under `place`, all synced to disk on the way."""
    seal = {}
    for path in sorted(place.rglob("*")):
        _sync(path)
        if path.is_file():
            seal[path.relative_to(place).as_posix()] = [path.stat().st_size, _crc32(path)]
    return seal


def _damage(place: Path, quick: bool = False) -> str:
    """What is wrong with the files of a checkpoint, "" if nothing; `quick` looks at their sizes only."""
    try:
        for name, (size, crc32) in json.loads((place / "seal.json").read_bytes()).items():
            found = (place / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes of {size}"
            if not quick and _crc32(place / name) != crc32:
                return f"{name} has changed"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _crc32(path: Path) -> int:
    crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc32 = zlib.crc32(block, crc32)
    return crc32


def _check_fits(place: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for path in [*wanted, *saved]:
        expected = _describe(wanted[path].dtype, wanted[path].shape) if path in wanted else "nothing"
        got = _describe(saved[path]["dtype"], saved[path]["shape"]) if path in saved else "nothing"
        if expected != got:
            raise ShoalError(
                f"{place} does not fit: at {path or 'the root'} expected {expected}, got {got}", OTHER
            )


def _reason(error: Exception) -> str:
    """An error in one line: Orbax's quote whole call chains."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return text.splitlines()[0][:200]


def _describe(dtype: Any, shape: Any) -> str:
    return f"{dtype} {list(shape)}"


def _sync(path: Path) -> None:
    """Put a file's bytes, or a directory's entries, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    """Orbax, imported when first needed (0.4 s), and kept quiet: what fails in it is raised, once.

    It and absl call `logging.info` and the like, which give a bare root logger a handler for good. When
    one array cannot be written, the others' threads print that they found its event loop closed.
    """
    placeholder, asyncio_log, hook = logging.NullHandler(), logging.getLogger("asyncio"), sys.unraisablehook
    logging.getLogger().addHandler(placeholder)
    asyncio_log.addFilter(_nothing)
    sys.unraisablehook = _nothing
    try:
        import orbax.checkpoint as ocp

        yield ocp
    except Exception:
        time.sleep(SECONDS_OF_ECHO)  # in the background, on the way to giving up this checkpoint
        raise
    finally:
        sys.unraisablehook = hook
        asyncio_log.removeFilter(_nothing)
        logging.getLogger().removeHandler(placeholder)


def _nothing(*_: object) -> bool:
    return False
