"""Metrics as rows: one JSON line per agent and chunk, appended as training goes, read back as columns.

Every row has `env_steps, updates, wall_s, agent`; whatever else it has is drawn and summarised by name.
"""

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from shoal.errors import ShoalError
from shoal.runs.manifest import reading, write_atomic

TAIL_BYTES = 262_144  # enough for the last chunk of many agents
BLOCK = 20_000  # rows parsed at once when reading: bounds memory, costs no speed
DELETE = "Delete that line to go on."

_log = logging.getLogger(__name__)


class RowWriter:
    """Appends rows to a `.jsonl` file. A full disk costs rows and one warning, never the training."""

    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._end = self._file.tell()
        self._warned = False

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append P rows at once: each column is an array [P] or a scalar that all rows share.

        Floats keep exactly their own precision; NaN and infinities become null. One system call per
        chunk, so that a crash tears at most the last row. About 10 µs a row of 15 columns.
        """
        arrays = [np.atleast_1d(np.asarray(column)) for column in columns.values()]
        rows = max(len(array) for array in arrays)
        texts = [np.broadcast_to(_json_texts(array), rows).tolist() for array in arrays]
        template = ", ".join(f"{json.dumps(name)}: %s" for name in columns)
        self._append("".join([f"{{{template % row}}}\n" for row in zip(*texts)]).encode())

    def close(self) -> None:
        """Close the file; every row is already in it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        try:
            if self._file.write(data) != len(data):
                raise OSError("the disk is full")
            self._end += len(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)  # no half row for the next one to be glued to
            if not self._warned:
                _log.warning("Metrics are being lost, training goes on: %s: %s", self._path, error)
            self._warned = True


def truncate_after(path: Path, updates: int) -> None:
    """Keep the rows with at most `updates` updates: those a run resumed from there will not redo.

    A torn last row goes too. Does nothing where there is no file.
    """
    if path.exists():
        with reading(path), open(path, "rb") as file:
            kept = [line for line in file if line.endswith(b"\n") and _updates(line, path) <= updates]
        write_atomic(path, b"".join(kept).decode())


def read_rows(path: Path) -> dict[str, np.ndarray]:
    """All complete rows as columns [rows], in the order of their first appearance.

    int64 or bool where every row has one, else float64 with NaN for null and absent. No file, no columns.
    About 7 s for a million rows of 15 columns.
    """
    columns: dict[str, list[np.ndarray]] = {}
    rows = 0
    for block in _blocks(path):
        for name in dict.fromkeys([*columns, *chain.from_iterable(block)]):
            parts = columns.setdefault(name, [np.full(rows, np.nan)] if rows else [])
            values = [row.get(name) for row in block]
            with reading(path):
                parts.append(np.array(values, dtype=float if None in values else None))
            if parts[-1].dtype.kind not in "biuf":
                raise ShoalError(f"{path} is damaged: not every {name} is a number", DELETE)
        rows += len(block)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def tail(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The complete rows from byte `offset` on, and the offset to ask for next time.

    Starts over from the first row if the file was cut (a resume) or replaced; no file, no rows.
    """
    if not path.exists():
        return [], 0
    with open(path, "rb") as file:
        if file.seek(0, 2) < offset:
            offset = 0
        file.seek(offset)
        lines = [line for line in file if line.endswith(b"\n")]
    return [_parse(line, path) for line in lines], offset + sum(map(len, lines))


def last_rows(path: Path) -> list[dict[str, Any]]:
    """The newest rows: those with the last complete row's updates. No file, no rows."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        start = max(0, file.seek(0, 2) - TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")[1 if start else 0 : -1]
    rows: list[dict[str, Any]] = []
    for line in reversed(lines):
        row = _parse(line, path)
        if rows and row.get("updates") != rows[0].get("updates"):
            break
        rows.append(row)
    return rows


def _json_texts(array: np.ndarray) -> np.ndarray:
    """The shortest JSON number that reads back as the same value, for each entry."""
    if array.dtype.kind == "b":
        return np.where(array, "true", "false")
    if array.dtype.kind in "iu":
        return array.astype(str)
    floats = array if array.dtype.kind == "f" else array.astype(np.float32)  # bfloat16 is none of NumPy's
    return np.where(np.isfinite(floats), floats.astype(str), "null")


def _parse(line: bytes, path: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(row := json.loads(line), dict):
            return row
    raise ShoalError(f"{path} has a damaged row: {line[:60]!r}", DELETE)


def _updates(line: bytes, path: Path) -> int:
    """The row's update count, without parsing the rest: populations have millions of rows."""
    found = re.search(rb'"updates": *(\d+)', line)
    return int(found[1]) if found else _parse(line, path)["updates"]


def _blocks(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Lists of rows, `BLOCK` at a time; one parse per block is far faster than one per line."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        while lines := [line for line in islice(file, BLOCK) if line.endswith(b"\n")]:
            block = []
            with contextlib.suppress(ValueError):
                block = json.loads(b"[" + b",".join(lines) + b"]")
            if len(block) != len(lines) or not all(isinstance(row, dict) for row in block):
                block = [_parse(line, path) for line in lines]  # raises, naming the line
            yield block
