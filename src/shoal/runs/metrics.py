"""Metrics as rows: one JSON line per agent and chunk, appended as training goes, read back as columns.

Every row has `env_steps, updates, wall_s, agent`; whatever else it has is drawn and summarised by name.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from shoal.errors import ShoalError
from shoal.runs.manifest import write_atomic

_log = logging.getLogger(__name__)


class RowWriter:
    """Appends rows to a `.jsonl` file. A full disk costs rows and one warning, never the training."""

    def __init__(self, path: Path):
        raise NotImplementedError

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append P rows at once: each column an array [P] or a scalar that all rows share.

        Floats keep exactly their own precision; NaN and infinities are written as null. One system
        call per chunk, so a crash tears at most the last row.
        """
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def truncate_after(path: Path, updates: int) -> None:
    """Keep the rows with at most `updates` updates: what a run resumed from there has not yet redone."""
    raise NotImplementedError


def read_rows(path: Path) -> dict[str, np.ndarray]:
    """All rows as columns [rows]: int64 and bool where every value is, float64 otherwise, null as NaN."""
    raise NotImplementedError


def tail(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The complete rows from byte `offset` on, and the offset to ask for next time."""
    raise NotImplementedError
