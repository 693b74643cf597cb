"""Train with Shoal and with others in turns, and compare: `shoal bench ppo-cartpole`.

Every contestant is a process (two or more for one that uses cores that way) kept alive for the whole
comparison, which compiles once and then trains a stretch whenever it is its turn: see `peers/worker.py`.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from shoal.app.assembly import cache_home
from shoal.errors import ShoalError
from shoal.mesh.devices import cores

WORKER = Path(__file__).parent / "peers" / "worker.py"
DEADLINES_S = {"start": 600, "stretch": 300, "learn": 1800}
STRETCH_STEPS = 700_000  # env steps of one turn, all agents together
SLOW_STEPS = 100_000  # of all turns of a contestant that is called slow
LEARN_STEPS, LEARN_UPDATES = 500_000, 150  # per agent: a whole training is the longer of the two
# What each peer needs, in the order of installation; torch first, or pip fetches gigabytes of CUDA.
PEERS = {
    "rejax": ("gymnax==0.0.9", "rejax==0.1.3"),
    "stable-baselines3": ("torch==2.13.0", "stable-baselines3==2.9.2"),
}

Row = dict[str, Any]
Say = Callable[[str], None]


class Workload(NamedTuple):
    """PPO on CartPole, 64-64 tanh networks, four epochs."""

    agents: int = 16
    envs: int = 4
    steps: int = 128
    minibatches: int = 4

    @property
    def per_update(self) -> int:
        return self.envs * self.steps

    @property
    def updates(self) -> int:
        """Of a whole training."""
        return max(-(-LEARN_STEPS // self.per_update), LEARN_UPDATES)

    def __str__(self) -> str:
        return f"{self.agents} × {self.envs} envs, T {self.steps}, {self.minibatches} minibatches"


WORKLOADS = (Workload(), Workload(envs=64), Workload(1, 64), Workload(1, 2048, 32, 8))


class Contestant(NamedTuple):
    name: str
    script: str  # in peers/
    python: str  # that runs it
    processes: int = 1
    one_agent: bool = False  # trains agents one after another: one is timed, more are extrapolated


def contestants() -> tuple[list[Contestant], list[str]]:
    """Those that can run here, and a line about each that cannot."""
    here, number = sys.executable, cores()
    found = [Contestant("shoal", "ours", here), Contestant("textbook", "textbook", here)]
    if number > 1:
        found.append(Contestant("textbook-per-core", "textbook", here, processes=number))
    missing = []
    for name, script in (("rejax", "rejax_ppo"), ("stable-baselines3", "sb3_ppo")):
        python = peer_folder(name) / "bin" / "python"
        if python.exists():
            found.append(Contestant(name, script, str(python), one_agent=name == "stable-baselines3"))
        else:
            missing.append(f"{name} is not installed and left out: shoal bench peers installs it")
    return found, missing


def peer_folder(name: str) -> Path:
    """The venv of a peer, apart from all others."""
    return cache_home() / "peers" / name


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


def compare(
    entered: Sequence[Contestant], workload: Workload, rounds: int, learn: bool, say: Say
) -> list[Row]:
    """One row per contestant: its rate over `rounds` turns, and what a whole training of it reaches."""
    with contextlib.ExitStack() as stack:
        teams = {}
        for one in entered:
            if workload.agents >= one.processes:
                say(f"{one.name}: starting")
                teams[one] = [stack.enter_context(worker) for worker in _workers(one, workload, rounds)]
                for worker in teams[one]:
                    worker.ready()
        rates: dict[Contestant, list[float]] = {one: [] for one in teams}
        for number in range(rounds):
            order = list(teams)[number % len(teams) :] + list(teams)[: number % len(teams)]
            for one in order:
                rates[one].append(_turn(teams[one]))
            shown = ", ".join(f"{one.name} {rates[one][-1] / 1e3:.0f} k" for one in teams)
            say(f"round {number + 1} of {rounds}: {shown} env steps/s")
        returns: dict[Contestant, list[float]] = {}
        for one in teams if learn else ():
            say(f"{one.name}: a whole training of {workload.updates * workload.per_update:,} steps per agent")
            asked = [worker.ask("learn") for worker in teams[one]]
            returns[one] = [x for answer in asked for x in answer()["returns"]]
        base = next((rates[one] for one in teams if one.name == "textbook"), None)
        return [_row(one, teams[one], workload, rates[one], base, returns.get(one)) for one in teams]


def _turn(team: Sequence["Worker"]) -> float:
    """Env steps per second of one stretch of all processes of a contestant together."""
    asked = [worker.ask("stretch") for worker in team]
    answers = [answer() for answer in asked]
    return sum(a["env_steps"] for a in answers) / max(a["seconds"] for a in answers)


def _row(
    one: Contestant,
    team: Sequence["Worker"],
    workload: Workload,
    rates: Sequence[float],
    base: Sequence[float] | None,
    returns: Sequence[float] | None,
) -> Row:
    ratio = None if base is None else float(np.median(np.asarray(rates) / np.asarray(base)))
    facts, rounded = team[0].facts, lambda x: round(float(x))
    extrapolated = one.one_agent and workload.agents > 1
    note = "extrapolated from one agent; " * extrapolated + facts["note"]
    return dict(
        name=one.name,
        agents=workload.agents,
        envs=workload.envs,
        steps_per_env=workload.steps,
        minibatches=workload.minibatches,
        env_steps_per_s=rounded(np.median(rates)),
        low=rounded(min(rates)),
        high=rounded(max(rates)),
        rounds=len(rates),
        ratio_to_textbook=None if ratio is None else round(ratio, 3),
        return_mean=None if not returns else round(float(np.mean(returns)), 1),
        return_sd=None if not returns or len(returns) < 2 else round(float(np.std(returns, ddof=1)), 1),
        trained=None if not returns else len(returns),
        compile_s=round(max(worker.facts["compile_s"] for worker in team), 1),
        note=note,
        versions=facts["versions"],
    )


def _workers(one: Contestant, workload: Workload, rounds: int) -> Iterator["Worker"]:
    """Its processes, each with its share of the agents, and a core of its own where there are several."""
    agents = 1 if one.one_agent else workload.agents
    steps = SLOW_STEPS // rounds if one.one_agent else STRETCH_STEPS
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None] * cores()
    first = 0
    for number in range(one.processes):
        share = agents // one.processes + (number < agents % one.processes)
        task: dict[str, Any] = dict(agents=share, first=first, updates=workload.updates)
        task |= dict(envs=workload.envs, steps=workload.steps, minibatches=workload.minibatches)
        task["stretch"] = max(1, round(steps / (agents * workload.per_update)))
        if one.processes > 1:
            task["core"] = allowed[number]
        first += share
        yield Worker(one, task)


class Worker:
    """A contestant's process. It is killed when its context is left, whatever happens."""

    def __init__(self, one: Contestant, task: Mapping[str, Any]):
        self.name = one.name
        self.command = [one.python, str(WORKER), one.script, json.dumps(task)]
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> "Worker":
        self.complaints: IO[bytes] = tempfile.TemporaryFile()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, stderr=self.complaints, text=True, env=_environment()
        )
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.complaints):
            with contextlib.suppress(OSError):
                file.close()  # type: ignore[union-attr]

    def ready(self) -> None:
        self.facts = self._answer("start")

    def ask(self, what: str) -> Callable[[], dict[str, Any]]:
        """Ask for a stretch or a whole training; the function returned waits for the answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: the answer says of what
            self.process.stdin.write(f'"{what}"\n')
            self.process.stdin.flush()
        return lambda: self._answer(what)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def _answer(self, what: str) -> dict[str, Any]:
        deadline = DEADLINES_S[what]
        try:
            line = self.answers.get(timeout=deadline)
        except queue.Empty:
            raise ShoalError(
                f"{self.name} has not answered {what!r} within {deadline} s", "run it alone"
            ) from None
        if not line:
            self.process.wait(10)
            self.complaints.seek(0)
            said = self.complaints.read().decode(errors="replace").strip().splitlines() or ["nothing"]
            raise ShoalError(f"{self.name} ended while asked to {what}; it said: {said[-1]}", self.command[0])
        return json.loads(line)


def _environment() -> dict[str, str]:
    """Ours, without what would give a peer another number of devices or another place to run."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "JAX_NUM_CPU_DEVICES")
    }


def markdown(rows: Sequence[Row]) -> str:
    """The rows as the table of a committed result, one block per workload."""
    blocks = []
    for workload in dict.fromkeys(
        Workload(r["agents"], r["envs"], r["steps_per_env"], r["minibatches"]) for r in rows
    ):
        mine = [r for r in rows if (r["agents"], r["envs"], r["steps_per_env"], r["minibatches"]) == workload]
        lines = [
            f"**{workload}**",
            "",
            "| | env steps/s, median | over rounds | to textbook | return | compile s |",
        ]
        lines.append("|---|---|---|---|---|---|")
        for r in mine:
            reached = "–"
            if r["return_mean"] is not None:
                spread = f", sd {r['return_sd']}" if r["return_sd"] is not None else ""
                reached = f"{r['return_mean']} (n = {r['trained']}{spread})"
            cells = (
                r["name"],
                f"{r['env_steps_per_s']:,}",
                f"{r['low']:,} … {r['high']:,}",
                r["ratio_to_textbook"],
                reached,
                r["compile_s"],
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def run(workloads: Sequence[Workload], rounds: int, learn: bool) -> list[Row]:
    """Compare on each workload in turn, telling how it goes on stderr."""
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

    entered, missing = contestants()
    for line in missing:
        say(line)
    rows = []
    for workload in workloads:
        say(str(workload))
        rows += compare(entered, workload, rounds, learn, say)
    return rows
