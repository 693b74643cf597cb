"""Some of a population's agents, trained in a process of its own: `python -m shoal.app.trial`, for `modes`.

The first line of stdin is the task, whose fields are `Task`'s. It compiles and warms up, says that it is
ready, and then answers each line of stdin with one of stdout, all JSON:

    {"what": "run"} → {"seconds": [one per stretch], "cpu_s": …, "host_bytes": …, "device_bytes": …, …}
    {"what": "evaluate"} → {"returns": [one per agent]}   of what was trained last, not timed

A stretch is one call of the compiled training program, with the first state that it starts from: as many
agents as the settings say, numbered from `first` on. A task that cannot be done is answered by {"refused":
[message, hint]}. When stdin ends the process does too, in the middle of whatever it does.
"""

import contextlib
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.algos.update import AgentState
from shoal.app import sweep
from shoal.app.assembly import Assembled, Compiler, assemble, refuse_too_large
from shoal.app.config import group_of, resolve
from shoal.app.peers.worker import opened
from shoal.app.session import fresh_state
from shoal.errors import ShoalError
from shoal.types import Tree

PROCESS = Path("/proc/self")


class Task(NamedTuple):
    train: dict[str, Any]  # every flat setting
    algo: dict[str, Any]
    env: dict[str, Any]
    sweep: list[str]  # what differs between agents, of which one alone could not make a grid
    population: int  # agents that the grid is dealt out to
    firsts: list[int]  # number of the first agent of each stretch
    compared: int  # updates that learn, after which parameters are kept to be compared
    params: str  # the file that they are written to: float32 [agents, all parameters] as .npy


def main() -> None:
    answer, questions = opened()
    task = Task(**questions.get())
    try:
        trial = Trial(task)
    except ShoalError as error:
        answer(refused=[error.message, error.hint])
        return
    answer(**trial.facts)
    while True:
        what = questions.get()["what"]
        answer(**(trial.run() if what == "run" else trial.evaluate()))


class Trial:
    """What was compiled for a task, and what it has trained."""

    def __init__(self, task: Task):
        self.task, self.made, self.compiler = task, _assembled(task), Compiler(lambda event: None)
        self.chunk, needed = self.compiler.training(self.made)
        refuse_too_large(self.made, needed)
        self.fresh = fresh_state(self.made, self.compiler)
        self.trained: list[AgentState] = []
        compared, update_s = self._warmed_up()
        np.save(task.params, compared, allow_pickle=False)
        devices = self.made.devices.devices
        strata = self.made.sizes.strata
        self.facts = dict(
            kind=self.made.devices.kind,
            device=devices[0].device_kind,
            devices=len(devices),
            device_limit=(devices[0].memory_stats() or {}).get("bytes_limit", 0),
            data_shards=max(n for n in range(1, len(devices) + 1) if strata % n == 0),
            updates=self.made.plan.updates,
            steps_per_update=self.made.plan.steps_per_update,
            update_s=update_s,
            start_bytes=peak_host_bytes(),  # with compiling
            notes=self.made.devices.notes,
        )
        forget_peak()

    def run(self) -> dict[str, Any]:
        """Train every stretch from its start, one after the other."""
        self.trained, cpu = [], time.process_time()
        seconds = []
        for first in self.task.firsts:
            started = time.perf_counter()
            self.trained.append(_without_replay(self._stretch(first, self.made.plan.updates)))
            seconds.append(time.perf_counter() - started)
        active = [np.asarray(state.identity.active)[: self.made.plan.agents] for state in self.trained]
        used = self.made.layout.mesh.devices.flat
        return dict(
            seconds=seconds,
            cpu_s=time.process_time() - cpu,
            host_bytes=peak_host_bytes(),
            device_bytes=sum((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in used),
            alive=int(np.sum(active)),
        )

    def evaluate(self) -> dict[str, Any]:
        """Mean return per agent of the sampled policy, over the same episodes for every agent."""
        evaluation = self.compiler.evaluation(self.made)
        replay = self.fresh().learner.replay  # not read, but part of the state
        returns: list[float] = []
        for state in self.trained:
            whole = state._replace(learner=state.learner._replace(replay=replay))
            sampled, _ = jax.device_get(evaluation(whole))
            returns += sampled.returns.mean(1)[: self.made.plan.agents].tolist()
        return dict(returns=returns)

    def _warmed_up(self) -> tuple[np.ndarray, float]:
        """Every agent's parameters after a few updates, and the seconds of an update."""
        starts = getattr(self.made.sizes, "learning_starts", 0) // self.made.plan.steps_per_update
        starts = min(starts, self.made.plan.updates - 1)
        updates = min(self.task.compared, self.made.plan.updates - starts)
        rows, seconds = [], []
        for first in self.task.firsts:
            state = self._stretch(first, starts)
            started = time.perf_counter()
            state, _ = jax.block_until_ready(self.chunk(state, np.int32(updates)))
            seconds.append(time.perf_counter() - started)
            rows.append(flat(state.learner.params)[: self.made.plan.agents])
        return np.concatenate(rows), float(np.median(seconds)) / updates

    def _stretch(self, first: int, updates: int) -> AgentState:
        state, _ = jax.block_until_ready(self.chunk(self.fresh(first), np.int32(updates)))
        return state


def _assembled(task: Task) -> Assembled:
    settings = resolve(task.train, {group_of(task.train["algo"]): task.algo, "env": task.env})
    made = assemble(settings)
    if not task.sweep:
        return made
    population = resolve(
        task.train | {"sweep": task.sweep, "agents": task.population},
        {group_of(task.train["algo"]): task.algo, "env": task.env},
    )
    return made._replace(axes=sweep.axes(population, made.env.default_params()))


def _without_replay(state: AgentState) -> AgentState:
    """So that a second replay is never held beside the first."""
    return state._replace(learner=state.learner._replace(replay=()))


def flat(params: Tree) -> np.ndarray:
    """All parameters of each agent in one row, float32 [P, all]; leaves are led by agents."""
    leaves = [np.asarray(x, np.float32) for x in jax.tree.leaves(params)]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], 1)


def peak_host_bytes() -> int:
    """Most memory of the host that this process has held at a time, since `forget_peak`."""
    if (status := PROCESS / "status").exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, else kB
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Let the peak begin anew, where the system can: on Linux; elsewhere it is that of compiling too."""
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


if __name__ == "__main__":
    main()
