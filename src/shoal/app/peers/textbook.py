"""PPO on CartPole as JAX code in the field usually has it: one file, nested scans, one device.

A loop over updates holds a scan over steps, and one over epochs that holds one over minibatches; a
population is a vmap around all of it. Every env has a key of its own at every step, minibatches come from
`jax.random.permutation` and `take`, values are computed while acting, `done` is any end of an episode, and
optax optimises. It is here to be compared with, and shares no code with shoal.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

PACKAGES = ("jax", "optax")
NOTE = "one program on one device"
LR, GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, MAX_NORM, EPOCHS = 2.5e-4, 0.99, 0.95, 0.2, 0.01, 0.5, 0.5, 4

Array = jax.Array
Tree = Any


class World(NamedTuple):
    """One CartPole, and what its episode has earned so far."""

    physics: Array  # [4] x, x_dot, theta, theta_dot
    time: Array  # int32
    earned: Array


class Transition(NamedTuple):
    """[T, B, …]"""

    obs: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    done: Array
    earned: Array  # by the episode, up to this step


class Runner(NamedTuple):
    params: Tree
    optimiser: Tree
    world: World  # [B]
    obs: Array  # [B, 4]
    key: Array
    episodes: Array  # that have ended
    return_sum: Array  # of those


# --- CartPole ---------------------------------------------------------------------------------


def reset(key: Array) -> tuple[Array, World]:
    physics = jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05)
    return physics, World(physics, jnp.int32(0), jnp.float32(0))


def step(key: Array, world: World, action: Array) -> tuple[Array, World, Array, Array, Array]:
    """The next observation and world, reset where the episode is over; reward, done, earned."""
    _, x_dot, theta, theta_dot = world.physics
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    push = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = push - 0.05 * theta_acc * cos / 1.1
    change = jnp.stack([x_dot, x_acc, theta_dot, theta_acc])
    after = World(world.physics + 0.02 * change, world.time + 1, world.earned + 1.0)
    out = (jnp.abs(after.physics[0]) > 2.4) | (jnp.abs(after.physics[2]) > 12 * jnp.pi / 180)
    done = out | (after.time >= 500)
    fresh_obs, fresh = reset(key)
    obs = jnp.where(done, fresh_obs, after.physics)
    kept = jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, after)
    return obs, kept, jnp.float32(1), done, after.earned


# --- Networks ---------------------------------------------------------------------------------


def network(layers: list[dict[str, Array]], x: Array) -> Array:
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def orthogonal(rng: np.random.Generator, rows: int, columns: int, scale: float) -> dict[str, np.ndarray]:
    """In NumPy: a batched QR inside a program can deadlock XLA's CPU threads."""
    q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
    q = q * np.sign(np.diag(r))
    w = scale * (q if rows >= columns else q.T)
    return {"w": w.astype(np.float32), "b": np.zeros(columns, np.float32)}


def first_params(agent: int) -> Tree:
    rng, root = np.random.default_rng(agent), float(np.sqrt(2))
    tower = lambda outputs, scale: [
        orthogonal(rng, 4, 64, root),
        orthogonal(rng, 64, 64, root),
        orthogonal(rng, 64, outputs, scale),
    ]
    return {"actor": tower(2, 0.01), "critic": tower(1, 1.0)}


# --- One update -------------------------------------------------------------------------------


def make_update(task: dict[str, int]) -> tuple[Callable[[Runner], Runner], optax.GradientTransformation]:
    envs, steps, minibatches = task["envs"], task["steps"], task["minibatches"]
    schedule = optax.linear_schedule(LR, 0.0, task["updates"] * EPOCHS * minibatches)
    optimiser = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(schedule, eps=1e-5))

    def env_step(runner: Runner, _: None) -> tuple[Runner, Transition]:
        key, act_key, step_key = jax.random.split(runner.key, 3)
        logits = network(runner.params["actor"], runner.obs)
        value = network(runner.params["critic"], runner.obs)[:, 0]
        action = jax.random.categorical(act_key, logits)
        log_prob = chosen(jax.nn.log_softmax(logits), action)
        step_keys = jax.random.split(step_key, envs)
        obs, world, reward, done, earned = jax.vmap(step)(step_keys, runner.world, action)
        transition = Transition(runner.obs, action, log_prob, value, reward, done, earned)
        return runner._replace(world=world, obs=obs, key=key), transition

    def minibatch(carried: tuple[Tree, Tree], batch: tuple[Transition, Array, Array]):
        params, state = carried
        gradient = jax.grad(loss)(params, *batch)
        change, state = optimiser.update(gradient, state, params)
        return (optax.apply_updates(params, change), state), None

    def update(runner: Runner) -> Runner:
        runner, path = jax.lax.scan(env_step, runner, None, steps)
        last_value = network(runner.params["critic"], runner.obs)[:, 0]
        advantage = advantages(path, last_value)
        batch = jax.tree.map(
            lambda x: x.reshape(steps * envs, *x.shape[2:]), (path, advantage, advantage + path.value)
        )

        def epoch(carried, _: None):
            key, *learned = carried
            key, order_key = jax.random.split(key)
            order = jax.random.permutation(order_key, steps * envs)
            shuffled = jax.tree.map(lambda x: jnp.take(x, order, axis=0), batch)
            split = jax.tree.map(lambda x: x.reshape(minibatches, -1, *x.shape[1:]), shuffled)
            learned, _ = jax.lax.scan(minibatch, tuple(learned), split)
            return (key, *learned), None

        carried = runner.key, runner.params, runner.optimiser
        (key, params, state), _ = jax.lax.scan(epoch, carried, None, EPOCHS)
        return runner._replace(
            params=params,
            optimiser=state,
            key=key,
            episodes=runner.episodes + jnp.sum(path.done, dtype=jnp.float32),
            return_sum=runner.return_sum + jnp.sum(path.earned * path.done),
        )

    return update, optimiser


def chosen(table: Array, action: Array) -> Array:
    return jnp.take_along_axis(table, action[:, None], axis=1)[:, 0]


def advantages(path: Transition, last_value: Array) -> Array:
    def back(carried: tuple[Array, Array], row: Transition):
        advantage, next_value = carried
        error = row.reward + GAMMA * next_value * (1 - row.done) - row.value
        advantage = error + GAMMA * LAMBDA * (1 - row.done) * advantage
        return (advantage, row.value), advantage

    nothing = jnp.zeros_like(last_value)
    return jax.lax.scan(back, (nothing, last_value), path, reverse=True, unroll=16)[1]


def loss(params: Tree, path: Transition, advantage: Array, target: Array) -> Array:
    log_probs = jax.nn.log_softmax(network(params["actor"], path.obs))
    ratio = jnp.exp(chosen(log_probs, path.action) - path.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    value = network(params["critic"], path.obs)[:, 0]
    near = path.value + jnp.clip(value - path.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(near - target)).mean()
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1).mean()
    return policy_loss + VALUE * value_loss - ENTROPY * entropy


# --- As a contestant --------------------------------------------------------------------------


def start(task: dict[str, int]) -> tuple[Callable[[int], int], Callable[[], list[float]], dict]:
    agents, first, envs = task["agents"], task["first"], task["envs"]
    update, optimiser = make_update(task)

    def fresh() -> Runner:
        params = [first_params(first + agent) for agent in range(agents)]
        return jax.jit(jax.vmap(begin))(jax.tree.map(lambda *x: jnp.stack(x), *params), keys)

    def begin(params: Tree, key: Array) -> Runner:
        key, reset_key = jax.random.split(key)
        obs, world = jax.vmap(reset)(jax.random.split(reset_key, envs))
        nothing = jnp.float32(0)
        return Runner(params, optimiser.init(params), world, obs, key, nothing, nothing)

    def train(runner: Runner, updates: Array) -> Runner:
        return jax.lax.fori_loop(0, updates, lambda _, runner: update(runner), runner)

    keys = jax.vmap(jax.random.key)(jnp.arange(first, first + agents))
    started = time.perf_counter()
    runner = fresh()
    program = jax.jit(jax.vmap(train, (0, None))).lower(runner, jnp.int32(0)).compile()
    compile_s = time.perf_counter() - started
    runner = jax.block_until_ready(program(runner, jnp.int32(task["warm_up"])))

    def stretch(updates: int) -> int:
        nonlocal runner
        runner = jax.block_until_ready(program(runner, jnp.int32(updates)))
        return updates * agents * envs * task["steps"]

    def learn() -> list[float]:
        nonlocal runner
        last = -(-task["updates"] // 20)
        before = program(fresh(), jnp.int32(task["updates"] - last))
        runner = program(before, jnp.int32(last))
        return ((runner.return_sum - before.return_sum) / (runner.episodes - before.episodes)).tolist()

    return stretch, learn, dict(compile_s=compile_s, note=NOTE)
