"""Rejax's PPO and DQN as contestants: its own training iterations, agents by vmap; plain Python."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from rejax import DQN, PPO
from rejax.algos.algorithm import Algorithm, register_init
from rejax.networks import DiscreteQNetwork, EpsilonGreedyPolicy

PACKAGES = ("rejax", "gymnax", "flax", "distrax", "jax", "optax")
NOTES = {
    "ppo": "Adam eps 1e-8; gradients clipped element by element",
    "dqn": "one next observation for truncated and terminated steps",
}


class Counted(Algorithm):
    """Also sums up the returns of the episodes that end."""

    @register_init
    def initialize_returns(self, key: jax.Array) -> dict[str, Any]:
        nothing = jnp.zeros(())
        return {"earned": jnp.zeros(self.num_envs), "episodes": nothing, "return_sum": nothing}

    def collect_trajectories(self, state: Any) -> Any:
        state, path = super().collect_trajectories(state)
        return counted(state, path.reward, path.done), path

    def collect_transitions(self, state: Any, *more: Any, **options: Any) -> Any:
        state, batch = super().collect_transitions(state, *more, **options)
        return counted(state, batch.reward[None], batch.done[None]), batch


class CountedPPO(Counted, PPO): ...


class CountedDQN(Counted, DQN): ...


def counted(state: Any, rewards: jax.Array, dones: jax.Array) -> Any:
    """The state after some steps of its envs, [T, B]."""

    def add(carried, row):
        earned, episodes, return_sum = carried
        reward, done = row
        earned = earned + reward
        sums = episodes + jnp.sum(done), return_sum + jnp.sum(earned * done)
        return (earned * (1 - done), *sums), None

    carried = state.earned, state.episodes, state.return_sum
    (earned, episodes, return_sum), _ = jax.lax.scan(add, carried, (rewards, dones))
    return state.replace(earned=earned, episodes=episodes, return_sum=return_sum)


def start(task: dict[str, Any]) -> tuple[Callable[[int], int], Callable[[], list[float]], dict]:
    per_update = task["envs"] * task["steps"]
    kinds = {"ppo": (PPO, CountedPPO), "dqn": (DQN, CountedDQN)}[task["algo"]]
    keys = jax.random.split(jax.random.key(task["first"]), task["agents"])
    started = time.perf_counter()
    fresh, program = compiled(kinds[0], task, keys)
    state = fresh(keys)
    compile_s = time.perf_counter() - started
    state = jax.block_until_ready(program(state, jnp.int32(task["warm_up"])))

    def stretch(updates: int) -> int:
        nonlocal state
        state = jax.block_until_ready(program(state, jnp.int32(updates)))
        return updates * task["agents"] * per_update

    def learn() -> list[float]:
        fresh, program = compiled(kinds[1], task, keys)
        last = -(-task["updates"] // 20)
        before = program(fresh(keys), jnp.int32(task["updates"] - last))
        after = program(before, jnp.int32(last))
        return ((after.return_sum - before.return_sum) / (after.episodes - before.episodes)).tolist()

    note = f"one program on one device, without its evaluations; {NOTES[task['algo']]}"
    return stretch, learn, dict(compile_s=compile_s, note=note)


def compiled(kind: type, task: dict[str, Any], keys: jax.Array) -> tuple[Callable, Callable]:
    """keys → states, and (states, updates) → states."""
    algo = (ppo if task["algo"] == "ppo" else dqn)(kind, task)

    def train(state: Any, updates: jax.Array) -> Any:
        return jax.lax.fori_loop(0, updates, lambda _, state: algo.train_iteration(state), state)

    fresh = jax.jit(jax.vmap(algo.init_state)).lower(keys).compile()
    program = jax.jit(jax.vmap(train, (0, None))).lower(fresh(keys), jnp.int32(0)).compile()
    return fresh, program


def ppo(kind: type[PPO], task: dict[str, Any]) -> PPO:
    return kind.create(
        env="CartPole-v1",
        agent_kwargs=dict(activation="tanh", hidden_layer_sizes=(64, 64)),
        num_envs=task["envs"],
        num_steps=task["steps"],
        num_epochs=4,
        num_minibatches=task["minibatches"],
        learning_rate=optax.linear_schedule(2.5e-4, 0.0, task["updates"] * 4 * task["minibatches"]),
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        vf_coef=0.5,
        ent_coef=0.01,
        max_grad_norm=0.5,
    )


def dqn(kind: type[DQN], task: dict[str, Any]) -> DQN:
    algo = kind.create(
        env="CartPole-v1",
        num_envs=task["envs"],
        num_epochs=task["minibatches"],
        buffer_size=10_000,
        fill_buffer=10_000,
        batch_size=128,
        target_update_freq=500,
        polyak=0.0,  # copies
        eps_start=1.0,
        eps_end=0.05,
        exploration_fraction=0.5,
        total_timesteps=task["updates"] * task["envs"],
        learning_rate=2.5e-4,
        gamma=0.99,
        ddqn=True,
    )
    network = EpsilonGreedyPolicy(DiscreteQNetwork)
    return algo.replace(agent=network(hidden_layer_sizes=(120, 84), action_dim=2, activation=nn.relu))
