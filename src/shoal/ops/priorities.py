"""Which past steps to learn from most: proportional prioritisation (Schaul et al. 2016, arXiv:1511.05952).

Priorities are float32 [B, slots] beside a replay, already raised to their exponent; 0 where nothing is yet.
A draw inverts cumulative sums in two levels, a block of the ring and a slot in it. That reads every priority
once and about √(envs * slots) numbers per row, in a few vector operations; a sum tree would read less
and take log₂ as many dependent steps. At 10,000 slots it is a small part of a gradient step.
"""

import math

import jax
import jax.numpy as jnp

from shoal.ops.replay import Index, per_stratum
from shoal.types import Array, Axis, Key

SMALLEST = 1e-6  # added to every error, so that each step stays possible


def enter(priority: Array, written: Array, steps: int, axis: Axis) -> Array:
    """The next `steps` of each env get the largest priority of all, 1 at first (algorithm 1, line 6)."""
    largest = _largest(jnp.max(priority), axis)
    place = (written + jnp.arange(steps, dtype=jnp.int32)) % priority.shape[1]
    return priority.at[:, place].set(jnp.where(largest > 0, largest, 1.0))


def sample_prioritised(
    key: Key, num_envs: int, priority: Array, minibatches: int, batch_size: int, axis: Axis
) -> tuple[Index, Array]:
    """Rows [minibatches, batch_size here] and the probability with which each was drawn, per draw.

    Each stratum of envs has an equal share of every minibatch; in it steps are drawn in proportion to their
    priority, one from each of equal parts of the cumulative sum (section 3.3).
    """
    here, keys, envs, rows = per_stratum(key, num_envs, batch_size, axis)
    slots = priority.shape[1]
    size = envs * slots
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    parts = len(here) * axis.size

    def one(key, priority):
        blocks = jnp.pad(priority.reshape(-1), (0, width * height - size)).reshape(height, width)
        mass = jnp.sum(blocks, 1)
        coarse, fine = jax.random.uniform(key, (2, minibatches, rows), jnp.float32)
        coarse = (jnp.arange(rows) + coarse) / rows
        block = _invert(mass, coarse)
        slot = _invert(blocks[block], fine)
        place = block * width + slot
        probability = blocks[block, slot] / (parts * jnp.sum(mass))
        return Index(place // slots, place % slots), probability

    index, probability = jax.vmap(one, out_axes=1)(keys, priority.reshape(len(here), envs, slots))
    index = index._replace(env=index.env + (here * envs)[:, None])
    return jax.tree.map(lambda x: x.reshape(minibatches, -1), (index, probability))


def weights(probability: Array, number: Array, beta: Array, axis: Axis) -> Array:
    """Importance weights [M, n] of rows drawn among `number` steps, the largest of a minibatch being 1."""
    weight = jnp.power(number * probability, -beta)
    return weight / _largest(jnp.max(weight, 1), axis)[:, None]


def _invert(mass: Array, share: Array) -> Array:
    """Where the cumulative sum of `mass` [..., k] first exceeds this share of the total; mass > 0 there."""
    total = jnp.cumsum(mass, -1)
    share = jnp.minimum(share, 1 - 2.0**-23)
    return jnp.sum(total <= share[..., None] * total[..., -1:], -1, dtype=jnp.int32)


def _largest(x: Array, axis: Axis) -> Array:
    """The largest x >= 0 over all shares; their axis can only add up."""
    if axis.size == 1:
        return x
    mine = jnp.arange(axis.size).reshape(-1, *(1,) * x.ndim) == axis.index
    return jnp.max(axis.sum(jnp.where(mine, x, 0.0)), 0)
