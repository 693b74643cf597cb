"""How should N agents be run? The same ones in five ways, in turns, in fresh processes: `shoal modes`.

    sequential  one after another on one device: one process, one program
    concurrent  a process for each, all at the same time on the same devices
    fused       all in one program on one device
    sharded     all in one program, its agents divided over the devices
    data        one after another, each one's envs divided over the devices

Each process (see `trial.py`) compiles, warms up, and waits; the wall time is from the word to go to the last
one's answer. What it runs is the program that `shoal train` runs, without a run folder.
"""

import contextlib
import functools
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from shoal.app import sweep
from shoal.app.config import Settings, TrainConfig, flag, group_of, resolve
from shoal.app.trial import Task
from shoal.app.utilisation import watched
from shoal.app.worker import Worker
from shoal.errors import ShoalError
from shoal.mesh.devices import cores, host_memory

COMMAND = sys.executable, "-m", "shoal.app.trial"
COMPARED_UPDATES = 20  # after which parameters are compared: longer, and the last bit's noise has grown
START_S, RUN_S = 600.0, 300.0  # deadlines; what a run is expected to take comes on top, many times over
PATIENCE = 20
NOT_HERE = {  # settings of `shoal train` that make no sense of agents that run apart, or are what is compared
    "mesh": "each mode has its own",
    "pbt": "agents that copy each other cannot run apart",
    "halving": "agents that are compared while they train cannot run apart",
    "stop_at": "every mode does the same work",
    "for_s": "every mode does the same work",
    "warmup_steps": "what comes before training is not compared",
}

Say = Callable[[str], None]


class Mode(NamedTuple):
    name: str
    tasks: tuple[Task, ...]  # one per process, without the file for parameters
    at_once: int  # of these processes
    devices: int  # that they run on, all together
    gpus: tuple[str, ...] = ()  # that processes are dealt out to; () = each sees all


class Turn(NamedTuple):
    """What one mode did in one round."""

    wall_s: float
    seconds: np.ndarray  # of every stretch, beside whatever ran with it
    host_bytes: int
    device_bytes: int
    utilisation: float | None  # of all cores, or GPUs
    cpu_s: float  # of all processes
    alive: int
    params: np.ndarray  # float32 [agents, all parameters] after the first updates
    returns: list[float]  # one per agent, of the first round


class Compared(NamedTuple):
    settings: Settings
    modes: dict[str, Mode]
    turns: dict[str, list[Turn]]
    facts: dict[str, Any]  # of the first process
    notes: list[str]


class Refused(ShoalError):
    """A mode that cannot be: its process says why."""


def compare(settings: Settings, rounds: int, say: Say) -> Compared:
    """Run every mode in turns, `rounds` times."""
    _refuse(settings)
    with tempfile.TemporaryDirectory(prefix="shoal-modes-") as folder:
        scratch = Path(folder)
        first = Mode("sequential", (_task(settings, 1, range(settings.train.agents)),), 1, 1)
        say("compiling what one agent needs")
        facts = _prepared(first, scratch)
        notes = list(facts["notes"])
        modes = {"sequential": first}
        turns = {"sequential": [_turn(first, facts, scratch, True, say)]}
        for mode in _others(settings, facts, turns["sequential"][0], notes):
            try:
                if mode.name != "concurrent":  # whose program is that of the first
                    _prepared(mode, scratch)
                turns[mode.name] = [_turn(mode, facts, scratch, True, say)]
                modes[mode.name] = mode
            except Refused as error:
                notes.append(f"{mode.name} is left out: {error.message}")
        for number in range(1, rounds):
            say(f"round {number + 1} of {rounds}")
            for name in np.roll(list(modes), -number):
                turns[str(name)].append(_turn(modes[str(name)], facts, scratch, False, say))
    return Compared(settings, modes, turns, facts, notes)


def variants(settings: Settings, cross: Sequence[str]) -> Iterator[tuple[dict[str, str], Settings]]:
    """The settings crossed with each `name=a,b`, beside what sets them apart."""
    names, values = [], []
    for one in cross:
        name, _, listed = one.partition("=")
        names.append(name.strip())
        values.append([value.strip() for value in listed.split(",") if value.strip()])
        if len(set(values[-1])) < 2:
            raise ShoalError(f"--cross {one} changes nothing", "for example --cross ppo.num_envs=4,64")
    group = group_of(settings.train.algo)
    for point in itertools.product(*values):
        tables = {"train": asdict(settings.train), group: settings.algo, "env": settings.env}
        for name, value in zip(names, point):
            table, _, key = name.rpartition(".")
            tables[table or "train"] = tables.get(table or "train", {}) | {key: value}
        yield dict(zip(names, point)), resolve(tables.pop("train"), tables)


def _refuse(settings: Settings) -> None:
    """ShoalError for what cannot be compared."""
    for name, why in NOT_HERE.items():
        if getattr(settings.train, name) != getattr(TrainConfig, name):
            raise ShoalError(f"shoal modes takes no {flag(name)}: {why}", "leave it out")
    if settings.train.agents < 2:
        raise ShoalError("one agent can be run in one way only", "use --agents 2 or more")
    if len(sweep.programs(settings)) > 1:
        raise ShoalError("a sweep over shapes has a program for each", "compare one of its shapes")


def _task(settings: Settings, agents: int, firsts: Sequence[int], mesh: str = "agent=1,data=1") -> Task:
    train = replace(settings.train, agents=agents, sweep=(), mesh=mesh)
    swept, population = list(settings.train.sweep), settings.train.agents
    return Task(
        asdict(train), settings.algo, settings.env, swept, population, list(firsts), COMPARED_UPDATES, ""
    )


def _others(settings: Settings, facts: dict[str, Any], alone: Turn, notes: list[str]) -> list[Mode]:
    """Every mode but the first, as this machine has them; what cannot be is noted."""
    agents, devices = settings.train.agents, facts["devices"]
    modes = [_concurrent(settings, facts, alone, notes)]
    modes.append(Mode("fused", (_task(settings, agents, [0]),), 1, 1))
    if (shards := math.ceil(agents / math.ceil(agents / devices))) > 1:
        task = _task(settings, agents, [0], f"agent={shards},data=1")
        modes.append(Mode("sharded", (task,), 1, shards))
    else:
        notes.append("sharded is left out: there is one device")
    if (shards := facts["data_shards"]) > 1:
        task = _task(settings, 1, range(agents), f"agent=1,data={shards}")
        modes.append(Mode("data", (task,), 1, shards))
    else:
        why = "there is one device" if devices == 1 else "an agent's envs cannot be divided"
        notes.append(f"data is left out: {why}")
    return modes


def _concurrent(settings: Settings, facts: dict[str, Any], alone: Turn, notes: list[str]) -> Mode:
    """A process for each agent, as many at a time as memory has room for.

    Processes share all cores of a CPU; GPUs are dealt out to them.
    """
    agents, devices, kind = settings.train.agents, facts["devices"], facts["kind"]
    each = max(alone.host_bytes, facts["start_bytes"])
    available = host_memory()
    fit = available // each if available else agents
    if facts["device_limit"] and alone.device_bytes:
        fit = min(fit, devices * facts["device_limit"] // alone.device_bytes)
    at_once = max(1, min(agents, fit))
    if at_once < agents:
        notes.append(f"concurrent: {at_once} of {agents} processes at a time, as no more fit into memory")
    one = replace(settings, train=replace(settings.train, devices=1))
    tasks = tuple(_task(one, 1, [i]) for i in range(agents))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = (listed if listed != [""] else list(map(str, range(devices))))[:devices] if kind == "gpu" else []
    shared = min(at_once, cores() if kind == "cpu" else devices)
    return Mode("concurrent", tasks, at_once, shared, tuple(gpus))


# --- One turn ---------------------------------------------------------------------------------


def _prepared(mode: Mode, scratch: Path) -> dict[str, Any]:
    """The facts of a process that compiled a mode's program; those to come find it in the cache.

    So their memory is that of training, not of compiling.
    """
    task = mode.tasks[0]
    quick = mode._replace(tasks=(task._replace(firsts=task.firsts[:1], compared=1),))
    with _workers(quick, [0], scratch) as (worker,):
        return _ready(worker, 1)


def _turn(mode: Mode, facts: dict[str, Any], scratch: Path, evaluate: bool, say: Say) -> Turn:
    """Run all processes of a mode: as many at a time as fit, from one word to go to the last answer."""
    wall_s, answers, params = 0.0, [], []
    returns: list[float] = []
    samples: list[float] = []
    number = len(mode.tasks)
    for begin in range(0, number, mode.at_once):
        these = range(begin, min(begin + mode.at_once, number))
        with _workers(mode, these, scratch) as workers:
            ready = _all([functools.partial(_ready, worker, len(these)) for worker in workers])
            stretches = max(len(mode.tasks[i].firsts) for i in these)
            expected = max(fact["update_s"] for fact in ready) * facts["updates"] * stretches
            with watched(facts["kind"], facts["devices"]) as seen:
                started = perf_counter()
                asked = [worker.ask("run", within_s=RUN_S + PATIENCE * expected) for worker in workers]
                answers += _all(asked)
                wall_s += perf_counter() - started
            samples += seen
            params += [np.load(_file(scratch, mode, i), allow_pickle=False) for i in these]
            if evaluate:
                asked = [worker.ask("evaluate", within_s=START_S * len(these)) for worker in workers]
                returns += [x for answer in _all(asked) for x in answer["returns"]]
    cpu_s = sum(answer["cpu_s"] for answer in answers)
    busy = float(np.mean(samples)) if samples else None
    at_once = lambda name: _most([answer[name] for answer in answers], mode.at_once)
    say(f"{mode.name}: {wall_s:.2f} s")
    return Turn(
        wall_s,
        np.asarray([x for answer in answers for x in answer["seconds"]]),
        at_once("host_bytes"),
        at_once("device_bytes"),
        cpu_s / (wall_s * cores()) if facts["kind"] == "cpu" else busy,
        cpu_s,
        sum(answer["alive"] for answer in answers),
        np.concatenate(params),
        returns,
    )


def _all(waits: Sequence[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each waits for. The first error is raised at once: the others wait for processes then killed."""
    pool = ThreadPoolExecutor(len(waits))
    try:
        answers = [pool.submit(wait) for wait in waits]
        for answer in as_completed(answers):
            answer.result()
        return [answer.result() for answer in answers]
    finally:
        pool.shutdown(wait=False)


def _most(numbers: Sequence[int], at_once: int) -> int:
    """The largest sum over those that ran at the same time."""
    return max(sum(numbers[i : i + at_once]) for i in range(0, len(numbers), at_once))


def _file(scratch: Path, mode: Mode, number: int) -> Path:
    return scratch / f"{mode.name}-{number}.npy"


@contextlib.contextmanager
def _workers(mode: Mode, numbers: Sequence[int], scratch: Path) -> Iterator[list[Worker]]:
    """Processes for these tasks of a mode, told what to do; all are killed in the end."""
    with contextlib.ExitStack() as stack:
        workers = []
        for i in numbers:
            name = f"{mode.name}, process {i}" if len(mode.tasks) > 1 else mode.name
            worker = stack.enter_context(Worker(name, COMMAND, _environment(i, mode)))
            worker.tell(mode.tasks[i]._replace(params=str(_file(scratch, mode, i)))._asdict())
            workers.append(worker)
        yield workers


def _ready(worker: Worker, beside: int) -> dict[str, Any]:
    facts = worker.ready(START_S * max(1, beside / cores()))
    if "refused" in facts:
        raise Refused(*facts["refused"])
    return facts


def _environment(number: int, mode: Mode) -> dict[str, str]:
    """Ours, but no process takes a whole accelerator for itself, or one that is not its own."""
    ours = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if mode.gpus:
        ours["CUDA_VISIBLE_DEVICES"] = mode.gpus[number % len(mode.gpus)]
    return ours
