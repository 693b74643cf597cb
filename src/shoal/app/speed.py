"""Training speed, beside others' programs and as agents and envs grow: `shoal bench ppo-cartpole` and others.

Rates are medians over rounds, in which all contestants take turns; ratios are medians of each round's ratio.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.app.contest import SHOAL, Contestant, Entry, Measured, Say, Workload, compare, installed, peer
from shoal.mesh.devices import cores

Row = dict[str, Any]

PPO_CARTPOLE = (Workload(), Workload(envs=64), Workload(1, 64), Workload(1, 2048, 32, 8))
DQN_CARTPOLE = Workload(16, 10, 1, 1, algo="dqn")
GROWTH = {
    "agents": [Workload(2**i) for i in range(9)],
    "envs": [Workload(1, 4**i) for i in range(1, 7)],
    "cnn": [Workload(agents, 16, env="breakout", net="cnn") for agents in (1, 2, 4, 16)],
}
PROFILES = {
    "cpu": (Workload(), Workload(4, 64, 128, 8, env="breakout"), Workload(4, 10, 1, 1, algo="dqn")),
    "gpu": (
        Workload(2048, device="gpu"),
        Workload(256, 64, 128, 8, env="breakout", device="gpu"),
        Workload(256, 64, 128, 8, env="breakout", net="cnn", device="gpu"),
        Workload(50, 10, 1, 1, algo="dqn", device="gpu"),
    ),
}


def teller() -> Say:
    """Tells on stderr how it goes."""
    began = time.perf_counter()
    return lambda text: print(f"{time.perf_counter() - began:5.0f} s  {text}", file=sys.stderr, flush=True)


def ppo_cartpole(workloads: Sequence[Workload], rounds: int, learn: bool, say: Say) -> list[Row]:
    """PPO beside a plain single-file program, one of that per core, and two libraries."""
    entered = [SHOAL, Contestant("textbook", "textbook", sys.executable)]
    if cores() > 1:
        entered.append(Contestant("textbook-per-core", "textbook", sys.executable, processes=cores()))
    others = peer("rejax", "rejax_algos"), peer("stable-baselines3", "sb3_ppo", one_agent=True)
    entered += installed(others, say)
    rows = []
    for work in workloads:
        say(str(work))
        fitting = [Entry(one, work) for one in entered if work.agents >= one.processes]
        measured = compare(fitting, rounds, learn, say)
        rows += [row(m) | dict(ratio_to_textbook=ratio(m, measured[1])) for m in measured]
    return rows


def dqn_cartpole(rounds: int, learn: bool, say: Say) -> list[Row]:
    """DQN beside rejax's, and 16 agents beside one per core."""
    alone = Entry(SHOAL, DQN_CARTPOLE._replace(agents=cores()))
    others = [Entry(one, DQN_CARTPOLE) for one in installed([peer("rejax", "rejax_algos")], say)]
    measured = compare([Entry(SHOAL, DQN_CARTPOLE), alone, *others], rounds, learn, say)
    against = measured[-1] if others else None
    return [
        row(m)
        | dict(ratio_to_rejax=against and ratio(m, against))
        | dict(wall_per_agent_to_one_per_core=ratio(measured[1], m))
        for m in measured
    ]


def scaling(rounds: int, say: Say) -> list[Row]:
    """Wall time and memory per agent as agents grow, as envs grow, and of convolutional networks."""
    rows = []
    for grows, workloads in GROWTH.items():
        measured = compare([Entry(SHOAL, work) for work in workloads], rounds, False, say)
        best = max(measured, key=lambda m: np.median(m.rates))
        rows += [
            row(m) | dict(grows=grows, wall_to_least=ratio(best, m), mb_per_agent=_mb_per_agent(m))
            for m in measured
        ]
    return rows


def profile(device: str, rounds: int, say: Say) -> list[Row]:
    """What a machine gives on its CPU or its GPU: one after another, as each may take all of its memory."""
    measured = [compare([Entry(SHOAL, work)], rounds, False, say)[0] for work in PROFILES[device]]
    return [row(m) | dict(mb_per_agent=_mb_per_agent(m)) for m in measured]


def ratio(of: Measured, to: Measured) -> float:
    return round(float(np.median(of.rates / to.rates)), 3)


def row(of: Measured) -> Row:
    """What every table has of a contestant."""
    (one, work), facts, returns = of.entry, of.facts, of.returns
    rounded = lambda x: round(float(x))
    extrapolated = one.one_agent and work.agents > 1
    return dict(
        name=one.name,
        algo=work.algo,
        env=work.env,
        net=work.net,
        agents=work.agents,
        envs=work.envs,
        steps_per_env=work.steps,
        minibatches=work.minibatches,
        env_steps_per_s=rounded(np.median(of.rates)),
        low=rounded(min(of.rates)),
        high=rounded(max(of.rates)),
        rounds=len(of.rates),
        return_mean=round(float(np.mean(returns)), 1) if returns else None,
        return_sd=round(float(np.std(returns, ddof=1)), 1) if len(returns) > 1 else None,
        trained=len(returns) or None,
        compile_s=round(facts["compile_s"], 1),
        note="extrapolated from one agent; " * extrapolated + facts["note"],
        versions=facts["versions"],
    )


def _mb_per_agent(of: Measured) -> float:
    return round(of.facts["bytes"] / 1e6 / of.entry.workload.agents, 2)
