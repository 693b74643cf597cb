"""Contestants that train in turns, and what was measured of them.

Each is a process (two or more for one that uses cores that way) kept alive for the whole comparison, which
compiles once and then trains a stretch whenever it is its turn: see `peers/worker.py`.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.app.assembly import cache_home
from shoal.app.worker import Worker
from shoal.errors import ShoalError
from shoal.mesh.devices import cores

WORKER = Path(__file__).parent / "peers" / "worker.py"
DEADLINES_S = {"start": 600, "stretch": 300, "learn": 1800}
TURN_S = 1.5  # of one turn, about
TIMED_STEPS = 100_000  # env steps of all turns of a contestant, at least
LEARN_STEPS, LEARN_UPDATES = 500_000, 150  # per agent: a whole training is the longer of the two
DQN_STARTS = 10_000  # env steps per agent before DQN learns: none of these are timed
# What each peer needs, in the order of installation; torch first, or pip fetches gigabytes of CUDA.
PEERS = {
    "rejax": ("gymnax==0.0.9", "rejax==0.1.3"),
    "stable-baselines3": ("torch==2.13.0", "stable-baselines3==2.9.2"),
}

Say = Callable[[str], None]


class Workload(NamedTuple):
    """What is trained. PPO: four epochs, networks of 64-64 units. DQN: see `peers/rejax_algos.py`."""

    agents: int = 16
    envs: int = 4
    steps: int = 128
    minibatches: int = 4
    algo: str = "ppo"
    env: str = "cartpole"
    net: str = "mlp"
    device: str = "cpu"

    @property
    def per_update(self) -> int:
        """Env steps of an agent."""
        return self.envs * self.steps

    @property
    def updates(self) -> int:
        """Of a whole training."""
        return max(-(-LEARN_STEPS // self.per_update), LEARN_UPDATES)

    @property
    def warm_up(self) -> int:
        """Updates after which every update takes as long as any."""
        return 2 + DQN_STARTS // self.per_update if self.algo == "dqn" else 1

    def __str__(self) -> str:
        sizes = f"{self.agents} × {self.envs} envs, T {self.steps}, {self.minibatches} minibatches"
        return f"{self.algo} on {self.env}, {sizes}{', cnn' * (self.net == 'cnn')}"


class Contestant(NamedTuple):
    name: str
    script: str  # in peers/
    python: str  # that runs it
    processes: int = 1
    one_agent: bool = False  # trains agents one after another: one is timed, more are extrapolated


SHOAL = Contestant("shoal", "ours", sys.executable)


class Entry(NamedTuple):
    contestant: Contestant
    workload: Workload


class Measured(NamedTuple):
    entry: Entry
    rates: np.ndarray  # env steps per second of all agents together, one per round
    returns: list[float]  # what whole trainings reached, one per agent; empty where none was asked for
    facts: dict[str, Any]  # versions, note, compile_s, and bytes where they are known


def peer_folder(name: str) -> Path:
    """The venv of a peer, apart from all others."""
    return cache_home() / "peers" / name


def installed(peers: Sequence[Contestant], say: Say) -> list[Contestant]:
    """Those that can run here; says which cannot."""
    for one in peers:
        if not Path(one.python).exists():
            say(f"{one.name} is not installed and left out: shoal bench peers installs it")
    return [one for one in peers if Path(one.python).exists()]


def peer(name: str, script: str, **more: Any) -> Contestant:
    return Contestant(name, script, str(peer_folder(name) / "bin" / "python"), **more)


def install_peers(say: Say) -> None:
    """Install each peer into a venv of its own; several minutes, and about a gigabyte."""
    for name, packages in PEERS.items():
        folder = peer_folder(name)
        say(f"installing {name} in {folder}")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for package in packages:
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", package]
            if subprocess.run(pip, check=False).returncode:
                raise ShoalError(f"{name}: pip install {package} failed", "its output above tells why")


def compare(entries: Sequence[Entry], rounds: int, learn: bool, say: Say) -> list[Measured]:
    """The rates of each over `rounds` turns, and where asked what a whole training of it reaches."""
    with contextlib.ExitStack() as stack:
        teams, turns = [], []
        for entry in entries:
            say(f"{_title(entry, entries)}: starting")
            team = [stack.enter_context(worker) for worker in _workers(entry)]
            for worker in team:
                worker.ready(DEADLINES_S["start"])
            teams.append(team)
            turns.append(_turn_updates(team, entry, rounds))
        rates: list[list[float]] = [[] for _ in entries]
        for number in range(rounds):
            for i in np.roll(np.arange(len(entries)), -number):
                steps, seconds = _stretch(teams[i], turns[i])
                rates[i].append(steps / seconds)
            shown = ", ".join(f"{_title(e, entries)} {r[-1] / 1e3:.0f} k" for e, r in zip(entries, rates))
            say(f"round {number + 1} of {rounds}: {shown} env steps/s")
        measured = []
        for entry, team, rate in zip(entries, teams, rates):
            facts = team[0].facts | {"compile_s": max(worker.facts["compile_s"] for worker in team)}
            returns = _learned(team, entry, say) if learn else []
            measured.append(Measured(entry, np.asarray(rate), returns, facts))
        return measured


def _title(entry: Entry, entries: Sequence[Entry]) -> str:
    """Its name, and its workload where these differ."""
    same = len({entry.workload for entry in entries}) == 1
    return entry.contestant.name if same else f"{entry.contestant.name} ({entry.workload})"


def _stretch(team: Sequence[Worker], updates: int) -> tuple[int, float]:
    """Env steps and seconds of one stretch of all processes of a contestant together."""
    asked = [worker.ask("stretch", within_s=DEADLINES_S["stretch"], updates=updates) for worker in team]
    answers = [answer() for answer in asked]
    return sum(a["env_steps"] for a in answers), max(a["seconds"] for a in answers)


def _turn_updates(team: Sequence[Worker], entry: Entry, rounds: int) -> int:
    """Updates of one turn."""
    updates = 1
    while (seconds := _stretch(team, updates)[1]) < TURN_S / 8:
        updates *= 4
    steps = entry.workload.per_update * (1 if entry.contestant.one_agent else entry.workload.agents)
    return max(round(updates * TURN_S / seconds), -(-TIMED_STEPS // (rounds * steps)))


def _learned(team: Sequence[Worker], entry: Entry, say: Say) -> list[float]:
    one, work = entry
    say(f"{one.name}: a whole training of {work.updates * work.per_update:,} steps per agent")
    asked = [worker.ask("learn", within_s=DEADLINES_S["learn"]) for worker in team]
    return [x for answer in asked for x in answer()["returns"]]


def _workers(entry: Entry) -> Iterator[Worker]:
    """Its processes, each with its share of the agents, and a core of its own where there are several."""
    one, work = entry
    agents = 1 if one.one_agent else work.agents
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None] * cores()
    first = 0
    for number in range(one.processes):
        share = agents // one.processes + (number < agents % one.processes)
        task = work._asdict() | dict(agents=share, first=first, updates=work.updates, warm_up=work.warm_up)
        if one.processes > 1:
            task["core"] = allowed[number]
        first += share
        command = [one.python, str(WORKER), one.script, json.dumps(task)]
        yield Worker(one.name, command, _environment())


def _environment() -> dict[str, str]:
    """Ours, without what would give a peer another number of devices or another place to run."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "JAX_NUM_CPU_DEVICES")
    }
