"""Rejax's PPO as a contestant: its own training iterations, agents by vmap; plain Python."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rejax import PPO
from rejax.algos.algorithm import register_init

PACKAGES = ("rejax", "gymnax", "flax", "distrax", "jax", "optax")
NOTE = (
    "one program on one device, without its evaluations; Adam eps 1e-8; gradients clipped element by element"
)


class Counted(PPO):
    """Also sums up the returns of the episodes that end."""

    @register_init
    def initialize_returns(self, key: jax.Array) -> dict[str, Any]:
        nothing = jnp.zeros(())
        return {"earned": jnp.zeros(self.num_envs), "episodes": nothing, "return_sum": nothing}

    def collect_trajectories(self, state: Any) -> Any:
        state, path = super().collect_trajectories(state)

        def add(carried, row):
            earned, episodes, return_sum = carried
            reward, done = row
            earned = earned + reward
            sums = episodes + jnp.sum(done), return_sum + jnp.sum(earned * done)
            return (earned * (1 - done), *sums), None

        carried = state.earned, state.episodes, state.return_sum
        (earned, episodes, return_sum), _ = jax.lax.scan(add, carried, (path.reward, path.done))
        return state.replace(earned=earned, episodes=episodes, return_sum=return_sum), path


def start(task: dict[str, int]) -> tuple[Callable[[], int], Callable[[], list[float]], float]:
    per_update = task["envs"] * task["steps"]
    keys = jax.random.split(jax.random.key(task["first"]), task["agents"])
    started = time.perf_counter()
    fresh, program = compiled(PPO, task, keys)
    state = fresh(keys)
    compile_s = time.perf_counter() - started
    state = jax.block_until_ready(program(state, jnp.int32(1)))

    def stretch() -> int:
        nonlocal state
        state = jax.block_until_ready(program(state, jnp.int32(task["stretch"])))
        return task["stretch"] * task["agents"] * per_update

    def learn() -> list[float]:
        fresh, program = compiled(Counted, task, keys)
        last = -(-task["updates"] // 20)
        before = program(fresh(keys), jnp.int32(task["updates"] - last))
        after = program(before, jnp.int32(last))
        return ((after.return_sum - before.return_sum) / (after.episodes - before.episodes)).tolist()

    return stretch, learn, compile_s


def compiled(kind: type[PPO], task: dict[str, int], keys: jax.Array) -> tuple[Callable, Callable]:
    """keys → states, and (states, updates) → states."""
    schedule = optax.linear_schedule(2.5e-4, 0.0, task["updates"] * 4 * task["minibatches"])
    algo = kind.create(
        env="CartPole-v1",
        agent_kwargs=dict(activation="tanh", hidden_layer_sizes=(64, 64)),
        num_envs=task["envs"],
        num_steps=task["steps"],
        num_epochs=4,
        num_minibatches=task["minibatches"],
        learning_rate=schedule,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        vf_coef=0.5,
        ent_coef=0.01,
        max_grad_norm=0.5,
    )

    def train(state: Any, updates: jax.Array) -> Any:
        return jax.lax.fori_loop(0, updates, lambda _, state: algo.train_iteration(state), state)

    fresh = jax.jit(jax.vmap(algo.init_state)).lower(keys).compile()
    program = jax.jit(jax.vmap(train, (0, None))).lower(fresh(keys), jnp.int32(0)).compile()
    return fresh, program
