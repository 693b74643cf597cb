"""Rollouts on the device: one scan over time, one vmap over envs, for one agent.

Owns what every env needs the same way: fresh resets, time limits, recurrent carries, masks, and
episode statistics. The true final observation is kept beside the reset one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.rollout.streams import EVALUATE, RESET, ROLLOUT, bulk, per_env, stream
from shoal.types import Agent, Array, Env, Key, Params, Step, Tree

FEW_ENVS = 32  # below which acting reads its weights row by row


class Actors(NamedTuple):
    """An agent's envs between rollouts; every leaf is led by B."""

    env_state: Tree
    obs: Tree
    carry: Tree  # recurrent state
    episode_return: Array  # [B] so far
    episode_length: Array  # [B] int32 steps so far


class Episodes(NamedTuple):
    """Sums over the episodes that ended in a rollout."""

    count: Array  # type: ignore[assignment]
    return_sum: Array
    length_sum: Array


def no_episodes() -> Episodes:
    zero = jnp.zeros((), jnp.float32)
    return Episodes(zero, zero, zero)


def choose(condition: Array, yes: Tree, no: Tree) -> Tree:
    """Leaf-wise `where` with the condition's axes leading; leaves that are the same are not copied."""

    def pick(a, b):
        if a is b:
            return a
        return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b)

    return jax.tree.map(pick, yes, no)


def spread(tree: Tree, number: int) -> Tree:
    """`number` copies of each leaf along a new first axis."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), tree)


def start(agent: Agent, env: Env, params: Params, key: Key, index: Array) -> Actors:
    """Envs at the start of an episode; `index` [B] are their global numbers."""
    state, obs = jax.vmap(env.reset, (0, None))(per_env(key, index), params)
    number = index.shape[0]
    zero = jnp.zeros((number,), jnp.float32)
    return Actors(state, obs, spread(agent.carry(), number), zero, zero.astype(jnp.int32))


def masks(env: Env, state: Tree, params: Params) -> Tree:
    """Which actions are allowed, [B, …], or None for an env that allows all."""
    return None if env.action_mask is None else jax.vmap(env.action_mask, (0, None))(state, params)


def advance(env: Env, keys: Key, state: Tree, action: Tree, length: Array, params: Params) -> Step:
    """One step of B envs with the time limit applied: `truncated` is never set beside `terminated`."""
    step = jax.vmap(env.step, (0, 0, 0, None))(keys, state, action, params)
    late = length + 1 >= env.time_limit if env.time_limit else jnp.zeros_like(step.truncated)
    return step._replace(truncated=(step.truncated | late) & ~step.terminated)


def draw(agent: Agent, keys: Key) -> Tree:
    """What acting needs at random for one step: one key per env [B] -> noise [B, …]."""
    return jax.vmap(lambda key: jax.tree.map(lambda x: x[0], agent.noise(key, 1)))(keys)


def collect(
    agent: Agent, env: Env, policy: Tree, actors: Actors, params: Params, keys: Key, num_steps: int
) -> tuple[Actors, dict[str, Tree], Episodes]:
    """T steps of B envs. keys [B], one per env: everything random in the rollout follows from them.

    Returns the envs after it, the columns of a Batch [T, B, …], and the episodes that ended.
    """
    draws = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(keys)
    noise = jax.vmap(lambda key: agent.noise(key, num_steps), out_axes=1)(draws[0])  # [T, B, …]
    step_keys, reset_keys = (jax.vmap(lambda k: bulk(k, num_steps), out_axes=1)(keys) for keys in draws[1:])
    fresh_carry = spread(agent.carry(), keys.shape[0])

    turned = _turned if keys.shape[0] < FEW_ENVS else lambda policy: policy
    policy = turned(policy)

    def step(actors, drawn):
        noise, step_key, reset_key = drawn
        mask = masks(env, actors.env_state, params)
        carry, action, extras = agent.act(turned(policy), actors.carry, actors.obs, mask, noise)
        after = advance(env, step_key, actors.env_state, action, actors.episode_length, params)
        ended = after.terminated | after.truncated
        fresh_state, fresh_obs = jax.vmap(env.reset, (0, None))(reset_key, params)
        returns, lengths = actors.episode_return + after.reward, actors.episode_length + 1
        columns = dict(
            obs=actors.obs,
            mask=mask,
            action=action,
            reward=after.reward,
            terminated=after.terminated,
            truncated=after.truncated,
            final_obs=after.obs,
            final_mask=masks(env, after.state, params),
            extras=extras,
        )
        ends = Episodes(ended, jnp.where(ended, returns, 0.0), jnp.where(ended, lengths, 0))
        actors = Actors(
            choose(ended, fresh_state, after.state),
            choose(ended, fresh_obs, after.obs),
            choose(ended, fresh_carry, carry),
            jnp.where(ended, 0.0, returns),
            jnp.where(ended, 0, lengths),
        )
        return actors, (columns, ends)

    actors, (columns, ends) = jax.lax.scan(step, actors, (noise, step_keys, reset_keys))
    total = lambda x: jnp.sum(x, dtype=x.dtype if x.dtype.kind == "f" else jnp.float32)
    return actors, columns, Episodes(*map(total, ends))


def _turned(policy: Tree) -> Tree:
    """Matrices transposed. Turned outside a loop and back inside it, weights lie in memory as acting on few
    rows reads them, all outputs of one input after the other."""
    return jax.tree.map(lambda x: x.T if x.ndim == 2 else x, policy)


def rollout_keys(seed: Array, agent_id: Array, update: Array, index: Array) -> Key:
    """One key per env [B] for one update's rollout and learning."""
    return per_env(stream(seed, agent_id, ROLLOUT, update), index)


def reset_key(seed: Array, agent_id: Array) -> Key:
    return stream(seed, agent_id, RESET)


def evaluation_keys(seed: int, index: Array) -> tuple[Key, Key, Key]:
    """Keys of evaluation episodes [E]: of their starts, of acting in them, of what the env draws."""
    keys = per_env(stream(seed, 0, EVALUATE), index)
    return jax.vmap(lambda key: tuple(jax.random.split(key, 3)))(keys)


def at_time(keys: Key, time: Array) -> Key:
    """Each episode's key [E] for one of its steps."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, time)


class Scores(NamedTuple):
    """One row per evaluation episode [E]."""

    returns: Array
    lengths: Array  # int32
    finished: Array  # bool; False where the step cap came first


def evaluate(
    agent: Agent,
    env: Env,
    policy: Tree,
    params: Params,
    index: Array,
    max_steps: int,
    greedy: bool,
    seed: int = 0,
) -> Scores:
    """One episode per entry of `index` [E], each until it ends or `max_steps` have passed.

    Start states and draws follow from `seed` and the episode's number alone, so every agent of every run
    faces the same ones. Statistics are frozen: nothing but `act` runs.
    """
    start_keys, act_keys, world_keys = evaluation_keys(seed, index)
    number = index.shape[0]
    state, obs = jax.vmap(env.reset, (0, None))(start_keys, params)
    carry = spread(agent.carry(), number)
    zero = jnp.zeros((number,), jnp.float32)
    scores = Scores(zero, zero.astype(jnp.int32), zero.astype(bool))

    def step(looped):
        time, state, obs, carry, scores = looped
        noise = None if greedy else draw(agent, at_time(act_keys, time))
        mask = masks(env, state, params)
        carry, action, _ = agent.act(policy, carry, obs, mask, noise)
        after = advance(env, at_time(world_keys, time), state, action, scores.lengths, params)
        playing = ~scores.finished
        scores = Scores(
            scores.returns + jnp.where(playing, after.reward, 0.0),
            scores.lengths + playing,
            scores.finished | after.terminated | after.truncated,
        )
        return time + 1, after.state, after.obs, carry, scores

    def going(looped):
        time, *_, scores = looped
        return (time < max_steps) & ~jnp.all(scores.finished)

    *_, scores = jax.lax.while_loop(going, step, (jnp.int32(0), state, obs, carry, scores))
    return scores
