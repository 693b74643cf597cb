"""Shoal itself as a contestant: the compiled training program, over all devices of the machine."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shoal.app.assembly import Compiler, assemble
from shoal.app.config import resolve
from shoal.app.session import fresh_state

PACKAGES = ("shoal", "jax")
NOTE = "one device per core"


def start(task: dict[str, int]) -> tuple[Callable[[], int], Callable[[], list[float]], float]:
    per_update = task["envs"] * task["steps"]
    flat = {"agents": task["agents"], "steps": task["updates"] * per_update}
    ppo = {"num_envs": task["envs"], "num_steps": task["steps"], "minibatches": task["minibatches"]}
    made = assemble(resolve(flat, {"ppo": ppo}))
    compiler = Compiler(lambda event: None)
    chunk, _ = compiler.training(made)
    fresh = fresh_state(made, compiler)

    def train(state: Any, updates: int) -> tuple[Any, Any]:
        return jax.block_until_ready(chunk(state, np.int32(updates)))

    state, _ = train(fresh(), 1)

    def stretch() -> int:
        nonlocal state
        budget = state.identity.budget + task["stretch"]  # an agent whose budget is spent learns no more
        state, _ = train(state._replace(identity=state.identity._replace(budget=budget)), task["stretch"])
        return task["stretch"] * task["agents"] * per_update

    def learn() -> list[float]:
        nonlocal state
        last = -(-task["updates"] // 20)
        state, _ = train(fresh(), task["updates"] - last)
        state, sums = train(state, last)
        return (sums["return_sum"] / sums["episodes"])[: task["agents"]].tolist()

    return stretch, learn, compiler.seconds
