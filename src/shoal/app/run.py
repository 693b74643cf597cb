"""A run as Python sees it."""

from pathlib import Path
from typing import Any, Self

import numpy as np

from shoal.app import policies, text
from shoal.runs import folder, manifest
from shoal.runs.folder import RunFolder
from shoal.runs.metrics import read_rows


class Run:
    """A run on disk: its result, its rows, and its agents as policies."""

    def __init__(self, path: str | Path, root: str | Path = "runs"):
        self.folder = folder.open_run(path, root)
        self.path = self.folder.path
        self.manifest: dict[str, Any] = manifest.read_object(self.folder.manifest)
        self.result: dict[str, Any] = self.manifest.get("result") or {}

    @classmethod
    def of(cls, run: RunFolder) -> Self:
        """The run in exactly this folder."""
        return cls(run.path)

    @property
    def finished(self) -> bool:
        """Whether it ran to its end and was evaluated; otherwise resume it."""
        return bool(self.manifest.get("finished"))

    @property
    def returns(self) -> np.ndarray:
        """Mean evaluation return of the sampled policy per agent, [P]; empty until the run has finished."""
        return np.asarray(self.result.get("returns", []), float)

    def metrics(self) -> dict[str, np.ndarray]:
        """The columns of metrics.jsonl: a row per agent and chunk.

        Those of a sweep over shapes are of all programs, numbered by a column `program`.
        """
        if not self.programs:
            return read_rows(self.folder.metrics)
        each = [part.metrics() for part in self.programs]
        each = [{"program": np.full(len(x["agent"]), i), **x} for i, x in enumerate(each) if x]
        common = [name for name in (each[0] if each else ()) if all(name in rows for rows in each)]
        return {name: np.concatenate([rows[name] for rows in each]) for name in common}

    @property
    def programs(self) -> list["Run"]:
        """The runs it consists of: those of a sweep over shapes, else none."""
        return [Run.of(part) for part in folder.parts(self.folder)]

    def best(self) -> policies.Policy:
        """The agent with the highest evaluation return."""
        return self.policy("best")

    def policy(self, agents: str | int = "all") -> policies.Policy:
        """Some agent (best, median, worst, an id) or the whole population as one program.

        A sweep over shapes has populations only in its `programs`.
        """
        return policies.load(self.path, agents)

    def __repr__(self) -> str:
        if not self.finished:
            return f"Run({self.path}, unfinished)"
        score = text.score(self.result.get("return_mean"))
        return f"Run({self.path}, return {score} over {len(self.returns)} agents)"
