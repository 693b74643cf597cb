"""Measurements of what has been trained, and of what a run costs: `shoal bench act|presets|pbt|overhead`.

What is compared runs in turns in one process, medians are quoted, and compiling is never part of a rate.
Training speed is measured in `speed.py`.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.app import afterwards, policies
from shoal.app.assembly import Compiler, assemble, use_compile_cache
from shoal.app.board import Board
from shoal.app.config import OutputConfig, nearest, resolve
from shoal.app.presets import PRESETS
from shoal.app.session import Store, fresh_state, train
from shoal.errors import ShoalError
from shoal.mesh.devices import open_devices
from shoal.runs import folder, statistics
from shoal.training import loop
from shoal.training.signals import Stop
from shoal.types import is_space

Row = dict[str, Any]

SIZES = (1, 4, 16, 64, 256, 1024)  # agents served together
CALLS, LOOPED_CALLS = 300, 20


def act(path: str | Path) -> list[Row]:
    """Latency of one action for each of 1 … 1,024 agents: one program against a loop over agents.

    The run's agents are repeated to fill the larger populations.
    """
    use_compile_cache()
    open_devices()
    trained = policies.load(path, "all")
    return [_act_row(trained, agents) for agents in SIZES]


def _act_row(trained: policies.Policy, agents: int) -> Row:
    chosen = np.arange(agents) % len(trained.agents)
    kept = {name: [trained.contract[name][i] for i in chosen] for name in ("agents", "returns")}
    params = jax.tree.map(lambda x: x[chosen], trained.params)
    together = policies.Policy(trained.agent, params, trained.contract | kept, single=False)
    obs = _zeros(trained.obs_space, (agents, 1))
    fused = _latencies(lambda: together.act(obs), CALLS)
    alone = [jax.tree.map(lambda x, i=i: x[i : i + 1], params) for i in range(agents)]
    one = jax.jit(lambda params, obs: together.raw(params, obs, None, None))
    first = _zeros(trained.obs_space, (1, 1))
    looped = _latencies(lambda: [one(params, first) for params in alone], LOOPED_CALLS)
    us = lambda seconds, q: round(float(np.quantile(seconds, q)) * 1e6, 1)
    return dict(
        agents=agents,
        p50_us=us(fused, 0.5),
        p99_us=us(fused, 0.99),
        actions_per_s=round(agents / float(np.median(fused))),
        loop_p50_us=us(looped, 0.5),
        loop_p99_us=us(looped, 0.99),
        loop_actions_per_s=round(agents / float(np.median(looped))),
    )


def _zeros(space: Any, lead: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), space, is_leaf=is_space)


def _latencies(call: Callable[[], Any], calls: int) -> np.ndarray:
    """Seconds of each call, after warming up."""
    seconds = []
    for i in range(calls + 5):
        started = time.perf_counter()
        jax.block_until_ready(call())
        if i >= 5:
            seconds.append(time.perf_counter() - started)
    return np.asarray(seconds)


def presets(env: str | None = None, agents: int = 16) -> list[Row]:
    """Train every preset (or one env's) at its full budget and report what it scores."""
    if env is not None and env not in (known := {name for name, _ in PRESETS}):
        raise ShoalError(
            f"no env called {env!r} has a preset", f"{nearest(env, known)} all measures all".strip()
        )
    rows = []
    for name, algo in PRESETS:
        if env is None or name == env:
            settings = resolve({"env": name, "algo": algo, "agents": agents})
            with tempfile.TemporaryDirectory() as root:
                run = train(settings, OutputConfig(root=root, report=False, quiet=True))
            assert run is not None
            wanted = ("return_mean", "return_iqm", "return_ci", "return_greedy", "wall_s", "compile_s")
            result = run.result
            rows.append(
                dict(env=name, algo=algo, agents=agents, steps=result["env_steps_per_agent"])
                | {key: result[key] for key in (*wanted, "env_steps_per_s", "alive")}
            )
    return rows


# What is searched over, and on what: here the best agent of a random search is still short of the optimum.
SEARCH_TASK = dict(env="mountaincar", agents=16, steps=200_000)
SEARCH_AXES = (
    "ppo.lr=log:1e-5..1e-1",
    "ppo.gae_lambda=0.5..1",
    "ppo.ent_coef=log:1e-4..1e-1",
    "ppo.gamma=0.9..0.999",
)


def pbt(seeds: int) -> list[Row]:
    """PBT against random search: the same agents, env steps, axes and first knobs, once per meta-seed.

    An agent is the best by the evaluation that training ends with; its score is that of other episodes. The
    last row has the mean differences over meta-seeds, and their 95 % intervals.
    """
    rows = []
    for seed in range(seeds):
        best, mean = zip(*(_searched(seed, chosen) for chosen in (True, False)))
        rows.append(
            dict(seed=str(seed), pbt_best=best[0], random_best=best[1], best_difference=best[0] - best[1])
        )
        rows[-1] |= dict(pbt_mean=mean[0], random_mean=mean[1], mean_difference=mean[0] - mean[1])
    values = {name: np.array([row[name] for row in rows]) for name in list(rows[0])[1:]}
    interval = lambda x: tuple(round(y, 1) for y in statistics.bootstrap_interval(x, statistics.mean))
    last = dict(seed="mean") | {name: float(x.mean()) for name, x in values.items()}
    rows = [{k: v if k == "seed" else round(v, 1) for k, v in row.items()} for row in (*rows, last)]
    none = dict(best_interval=None, mean_interval=None)
    ends = {f"{name}_interval": interval(values[f"{name}_difference"]) for name in ("best", "mean")}
    return [row | (ends if row["seed"] == "mean" and seeds > 1 else none) for row in rows]


def _searched(seed: int, by_pbt: bool) -> tuple[float, float]:
    """Scores of the best agent, and of the population."""
    settings = resolve(SEARCH_TASK | dict(seed=seed, sweep=SEARCH_AXES, pbt=by_pbt))
    with tempfile.TemporaryDirectory() as root:
        run = train(settings, OutputConfig(root=root, report=False, quiet=True))
        assert run is not None
        again = np.array(afterwards.evaluate(run.path, seed=1)["returns"])
    return float(again[int(np.argmax(run.result["returns"]))]), float(again.mean())


def overhead(rounds: int = 12, steps: int = 100_000) -> list[Row]:
    """What rows, progress and checkpoints cost: training with them and without, in turns.

    16 CartPole agents; with them, each round writes its rows, feeds the board, and saves once at its end.
    """
    made = assemble(resolve({"agents": 16, "steps": steps}))
    compiler = Compiler(lambda event: None)
    chunk, _ = compiler.training(made)
    make = fresh_state(made, compiler)
    with tempfile.TemporaryDirectory() as root:
        run = folder.create(root, "cartpole", "ppo")

        def one(on: bool) -> float:
            state = jax.block_until_ready(make())
            store = Store(run, made.plan.agents, keep=1) if on else _Nothing()
            started = time.perf_counter()
            listen = Board() if on else _ignore
            loop.train(made.plan, chunk, _never, state, loop.Tally(), store, Stop(), listen)
            store.close()
            return time.perf_counter() - started

        one(True), one(False)
        pairs = [(one(True), one(False)) if i % 2 else (one(False), one(True))[::-1] for i in range(rounds)]
    costs = np.asarray([on / off - 1 for on, off in pairs])
    low, high = statistics.bootstrap_interval(costs, statistics.median)
    on_s, off_s = np.median(np.asarray(pairs), axis=0)
    return [
        dict(
            rounds=rounds,
            on_s=round(float(on_s), 3),
            off_s=round(float(off_s), 3),
            cost_percent=round(100 * float(np.median(costs)), 2),
            cost_percent_low=round(100 * float(low), 2),
            cost_percent_high=round(100 * float(high), 2),
        )
    ]


class _Nothing:
    """A store that keeps nothing."""

    def rows(self, columns: Row) -> None: ...
    def evaluation(self, columns: Row) -> None: ...
    def lineage(self, columns: Row) -> None: ...
    def save(self, state: Any, tally: loop.Tally) -> None: ...
    def close(self) -> None: ...


def _ignore(event: Any) -> None: ...


def _never(state: Any) -> Any:
    raise AssertionError("this plan has no evaluations")
