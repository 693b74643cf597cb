"""Past steps in a ring per env: written in place, drawn at random, read as n-step returns.

A replay is a Steps whose leaves are [B, slots, …]. `written` counts the steps that each env has put in so
far; step i lies at slot i % slots, so that in a full ring the newest step takes the oldest one's place.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.errors import ShoalError, check_counts
from shoal.ops.shuffle import strata
from shoal.types import Array, Axis, Batch, Key, Tree


class Steps(NamedTuple):
    """What is kept of env steps, in the dtypes they come in: a byte of an image stays a byte."""

    obs: Tree
    action: Tree
    reward: Array
    terminated: Array  # bool
    truncated: Array  # bool
    final_obs: Tree  # the true observation after the step
    final_mask: Tree = None  # the action mask there; None for an algorithm that reads none


class Index(NamedTuple):
    """Where rows lie: leaves have any one shape, int32."""

    env: Array  # of this share
    slot: Array


def empty(slots: int, obs: Tree, action: Tree, mask: Tree = None) -> Steps:
    """A ring of one env, leaves [slots, …], for observations, actions and masks such as these of one step."""
    flag = jnp.zeros((), bool)
    step = Steps(obs, action, jnp.zeros((), jnp.float32), flag, flag, obs, mask)
    return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), step)


def insert(replay: Steps, batch: Batch, written: Array) -> Steps:
    """The replay with the T steps of a rollout behind the `written` ones that each env had put in."""
    slots, steps = replay.reward.shape[1], batch.reward.shape[0]
    place = (written + jnp.arange(steps, dtype=jnp.int32)) % slots
    mask = replay.final_mask
    if mask is not None:
        allowed = lambda x: jnp.ones((steps, x.shape[0], *x.shape[2:]), bool)
        mask = jax.tree.map(allowed, mask) if batch.final_mask is None else batch.final_mask
    ends = batch.terminated, batch.truncated
    new = Steps(batch.obs, batch.action, batch.reward, *ends, batch.final_obs, mask)
    # A lone step goes in twice: as one slice XLA's CPU backend would fuse its writing into whatever reads the
    # ring, and copy the whole of it each time.
    row = jnp.arange(max(2, steps)) % steps
    return jax.tree.map(lambda ring, x: ring.at[:, place[row]].set(x[row].swapaxes(0, 1)), replay, new)


def gather(replay: Tree, index: Index) -> Tree:
    """The rows at `index` of a replay or a part of it, leaves [*index, …]."""
    return jax.tree.map(lambda x: x[index.env, index.slot], replay)


class Returns(NamedTuple):
    """What followed on each row: its return is `reward` + `discount` * V(final_obs)."""

    reward: Array  # discounted sum
    discount: Array  # gamma^k after the k steps taken, 0 where they ended in termination
    final_obs: Tree
    final_mask: Tree


def n_step(replay: Steps, index: Index, written: Array, steps: int, gamma: Array | float) -> Returns:
    """Returns of up to `steps` steps from each row on (Sutton 1988; `Rainbow`, Hessel et al. 2018, eq. 3).

    Fewer where the episode ends before, and where the ring does: past the newest step lies the oldest one.
    Every step knows its true next observation, so any number of them makes a return.
    """
    slots = replay.reward.shape[1]
    ahead = jnp.arange(steps, dtype=jnp.int32)
    env, window = index.env[..., None], (index.slot[..., None] + ahead) % slots
    newest = window == (written - 1) % slots
    last = replay.terminated[env, window] | replay.truncated[env, window] | newest
    taken = jnp.cumsum(last, -1, dtype=jnp.int32) - last == 0
    number = jnp.sum(taken, -1, dtype=jnp.int32)
    powers = jnp.power(gamma, ahead.astype(jnp.float32))
    reward = jnp.sum(jnp.where(taken, powers * replay.reward[env, window], 0.0), -1)
    end = gather(replay, Index(index.env, (index.slot + number - 1) % slots))
    discount = jnp.where(end.terminated, 0.0, jnp.power(gamma, number.astype(jnp.float32)))
    return Returns(reward, discount, end.final_obs, end.final_mask)


# --- Which rows -------------------------------------------------------------------------------


def check_replay(group: str, num_envs: int, num_steps: int, buffer_size: int, batch_size: int) -> None:
    """ShoalError unless a ring per env holds `buffer_size` steps in all, and a rollout fits into it."""
    check_counts(group, dict(buffer_size=buffer_size, batch_size=batch_size), "buffer_size", "batch_size")
    if rest := buffer_size % num_envs:
        raise ShoalError(
            f"buffer_size = {buffer_size} is not divisible by num_envs = {num_envs}",
            f"try --{group}.buffer_size {buffer_size + num_envs - rest}",
        )
    if num_envs * num_steps > buffer_size:
        raise ShoalError(
            f"num_envs * num_steps = {num_envs * num_steps} steps of an update do not fit into "
            f"buffer_size = {buffer_size}",
            f"use --{group}.buffer_size {num_envs * num_steps} or more",
        )


def per_stratum(key: Key, num_envs: int, batch_size: int, axis: Axis) -> tuple[Array, Key, int, int]:
    """This share's strata [S here], a key for each, the envs in one, and its rows in a minibatch."""
    total = strata(num_envs, batch_size)
    here = jnp.arange(total // axis.size, dtype=jnp.int32)
    keys = jax.vmap(lambda s: jax.random.fold_in(key, axis.index * len(here) + s))(here)
    return here, keys, num_envs // total, batch_size // total


def sample_uniform(
    key: Key, num_envs: int, filled: Array, minibatches: int, batch_size: int, axis: Axis
) -> Index:
    """Rows [minibatches, batch_size here] drawn with replacement from the first `filled` slots of each env.

    num_envs and batch_size count all shares; every share gives the same key.
    """
    here, keys, envs, rows = per_stratum(key, num_envs, batch_size, axis)
    filled = filled.astype(jnp.uint32)

    def one(s, key):
        pick = jax.random.bits(key, (minibatches, rows), jnp.uint32) % (envs * filled)
        return Index(s * envs + (pick // filled).astype(jnp.int32), (pick % filled).astype(jnp.int32))

    drawn = jax.vmap(one, out_axes=1)(here, keys)  # [M, S here, rows]
    return jax.tree.map(lambda x: x.reshape(minibatches, -1), drawn)


def sample_normal(key: Key, num_envs: int, minibatches: int, batch_size: int, size: int, axis: Axis) -> Array:
    """Standard normal noise [minibatches, batch_size here, size] for rows that were drawn by stratum."""
    _, keys, _, rows = per_stratum(key, num_envs, batch_size, axis)
    draw = lambda key: jax.random.normal(key, (minibatches, rows, size), jnp.float32)
    return jax.vmap(draw, out_axes=1)(keys).reshape(minibatches, -1, size)
