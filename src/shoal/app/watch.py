"""The verb `watch`: the board of a run that another process trains, drawn from its files alone."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.app.board import board
from shoal.app.config import group_of
from shoal.runs import folder, manifest
from shoal.runs.folder import RunFolder
from shoal.runs.metrics import tail
from shoal.training import events

SECONDS_BETWEEN_LOOKS = 0.5
FACTS = ("env", "algo", "agents", "lanes", "devices", "device", "steps", "steps_asked", "updates", "notes")


def watch(
    run: str = "last",  # a name under --root, a path, or `last`
    /,
    root: str = "runs",  # the folder of run folders
) -> None:
    """Watch a live run from another terminal; ends when it does."""
    found = folder.open_run(run, root)
    for number, program in enumerate(_programs(found)):
        if number or program != found:
            print(f"{program.path}:")
        with board() as show:
            for event in replay(program):
                show(event)
    print(f"{found.path}: {folder.status(found)}")


def _programs(run: RunFolder) -> Iterator[RunFolder]:
    """The run itself; of a sweep over shapes its newest program, and those that begin while it is live."""
    if folder.PARTS not in manifest.read_object(run.manifest):
        yield run
        return
    watched = max(0, len(folder.parts(run)) - 1)
    while True:
        live = folder.status(run) == "live"  # asked first: a program that began before the end is still seen
        begun = folder.parts(run)[watched:]
        yield from begun
        watched += len(begun)
        if not live:
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


def replay(run: RunFolder) -> Iterator[events.Event]:
    """What a run's training says, read from its files as they grow, until nobody trains it any more."""
    facts = manifest.read_object(run.manifest, *FACTS)
    algo = manifest.read_toml(run.config).get(group_of(facts["algo"]), {})
    planned = False
    chunks, evaluations = _Chunks(run.metrics, facts["agents"]), _Chunks(run.eval, facts["agents"])
    while True:
        live = folder.status(run) == "live"  # asked first: what is written before the end is still read
        for rows in chunks.new():
            with manifest.reading(run.metrics):
                progress = _progress(rows, facts["updates"])
            if not planned:
                yield _planned(facts, algo)
                planned = True
            yield progress
        for rows in evaluations.new():
            with manifest.reading(run.eval):
                evaluated = _evaluated(rows)
            yield evaluated
        if not live:
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


class _Chunks:
    """The rows of a growing file, a whole population at a time."""

    def __init__(self, path: Any, agents: int):
        self.path, self.agents, self.offset = path, agents, 0
        self.rest: list[dict[str, Any]] = []

    def new(self) -> list[list[dict[str, Any]]]:
        rows, offset = tail(self.path, self.offset)
        self.rest = self.rest + rows if offset >= self.offset else rows  # the file was cut: a resume
        self.offset = offset
        whole = len(self.rest) - len(self.rest) % self.agents
        chunks = [self.rest[i : i + self.agents] for i in range(0, whole, self.agents)]
        self.rest = self.rest[whole:]
        return chunks


def _planned(facts: Mapping[str, Any], algo: Mapping[str, Any]) -> events.Planned:
    return events.Planned(
        env=facts["env"],
        algo=facts["algo"],
        agents=facts["agents"],
        lanes=facts["lanes"],
        envs=algo.get("num_envs", 1),
        devices=facts["devices"],
        device_kind=facts["device"],
        steps_asked=facts["steps_asked"],
        steps=facts["steps"],
        updates=facts["updates"],
        bytes_predicted=0,
        notes=tuple(facts["notes"]),
    )


def _progress(rows: Sequence[Mapping[str, Any]], total: int) -> events.Progress:
    last = max(rows, key=lambda row: row["env_steps"])
    return events.Progress(
        updates=last["updates"],
        total_updates=total,
        env_steps=last["env_steps"],
        env_steps_per_s=last["env_steps_per_s"] or 0.0,
        wall_s=last["wall_s"],
        eta_s=(total - last["updates"]) * last["wall_s"] / last["updates"],
        returns=np.array([row["return_mean"] for row in rows], float),
        active=np.array([row["alive"] for row in rows], bool),
    )


def _evaluated(rows: Sequence[Mapping[str, Any]]) -> events.Evaluated:
    returns = np.array([row["return_mean"] for row in rows], float)
    return events.Evaluated(rows[0]["updates"], rows[0]["env_steps"], returns)
