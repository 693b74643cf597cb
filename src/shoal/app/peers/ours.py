"""Shoal itself as a contestant: the compiled training program, over all devices of the machine."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shoal.app.assembly import Compiler, assemble
from shoal.app.config import resolve
from shoal.app.session import fresh_state

PACKAGES = ("shoal", "jax")


def start(task: dict[str, Any]) -> tuple[Callable[[int], int], Callable[[], list[float]], dict]:
    per_update = task["envs"] * task["steps"]
    flat = {name: task[name] for name in ("agents", "algo", "env", "net", "device")}
    sizes = {"num_envs": task["envs"], "num_steps": task["steps"], "minibatches": task["minibatches"]}
    made = assemble(resolve(flat | {"steps": task["updates"] * per_update}, {task["algo"]: sizes}))
    compiler = Compiler(lambda event: None)
    chunk, needed = compiler.training(made)
    fresh = fresh_state(made, compiler)

    def train(state: Any, updates: int) -> tuple[Any, Any]:
        return jax.block_until_ready(chunk(state, np.int32(updates)))

    state, _ = train(fresh(), task["warm_up"])

    def stretch(updates: int) -> int:
        nonlocal state
        budget = state.identity.budget + updates  # an agent whose budget is spent learns no more
        state, _ = train(state._replace(identity=state.identity._replace(budget=budget)), updates)
        return updates * task["agents"] * per_update

    def learn() -> list[float]:
        nonlocal state
        last = -(-task["updates"] // 20)
        state, _ = train(fresh(), task["updates"] - last)
        state, sums = train(state, last)
        return (sums["return_sum"] / sums["episodes"])[: task["agents"]].tolist()

    devices = made.layout.mesh.devices.flat
    note = f"{len(devices)} × {devices[0].device_kind}, agents or their envs over them"
    return stretch, learn, dict(compile_s=compiler.seconds, note=note, bytes=needed)
