"""Checkpoints: the whole train state, so that a run continues bit for bit after any interruption.

A checkpoint is one folder `checkpoints/<updates>/`, complete or absent: arrays by Orbax, `state.json`
(every leaf's path, dtype and shape, and the caller's meta), `seal.json` (size and CRC-32 of every file).
"""

from pathlib import Path
from typing import Any, Self

Tree = Any  # a pytree of jax arrays


class Saver:
    """Saves in the background: `save` returns once the state is copied, the next call reports failures."""

    def __init__(self, folder: Path, last: int = 3):
        raise NotImplementedError

    def save(self, step: int, state: Tree, meta: dict[str, Any], protect: set[int] | None = None) -> None:
        """Copy `state` (its buffers may be donated right after) and write it as `step` behind the loop's back.

        Older checkpoints but the newest `last` and those in `protect` go once the new one is complete.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Return once everything is on disk; raise what the last save failed with."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def save(folder: Path, step: int, state: Tree, meta: dict[str, Any]) -> None:
    """Write `state` and `meta` as checkpoint `step` (= updates); complete and synced when this returns."""
    raise NotImplementedError


def restore(folder: Path, like: Tree, step: int | None = None) -> tuple[Tree, dict[str, Any]]:
    """The state and meta of `step`, or of the newest undamaged checkpoint, as sharded and typed as `like`."""
    raise NotImplementedError


def steps(folder: Path) -> list[int]:
    """The complete checkpoints in `folder`, oldest first."""
    raise NotImplementedError


def keep(folder: Path, last: int = 3, protect: set[int] | None = None) -> None:
    """Delete all but the newest `last` undamaged checkpoints and those in `protect`."""
    raise NotImplementedError
