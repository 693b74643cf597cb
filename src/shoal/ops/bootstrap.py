"""What the future is worth after each step of a rollout, through truncation but not through termination."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shoal.ops.parts import parts
from shoal.types import Array, Tree

BLOCK = 1024  # rows


def values(
    read: Callable[[Tree], Array], obs: Tree, final_obs: Tree, truncated: Array
) -> tuple[Array, Array]:
    """V of every observation and of every true next observation, both [T, B]; obs leaves are [T, B, …].

    `read` gives the values [n] of n observations. The next observation is the following row's, except where
    an episode was truncated and at the end of the rollout. Truncations are few, so they are read one per env
    at a time until none is left, instead of reading every observation twice.
    """
    steps, envs = truncated.shape
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
    value = _in_blocks(read, flat).reshape(steps, envs)
    last = read(jax.tree.map(lambda x: x[-1], final_obs))
    next_value = jnp.concatenate([value[1:], last[None]])
    env = jnp.arange(envs, dtype=jnp.int32)

    def pending(looped):
        return jnp.any(looped[0])

    def read_one(looped):
        open_rows, next_value = looped
        time = jnp.argmax(open_rows, axis=0)  # each env's first open row, or row 0 where none is
        one = read(jax.tree.map(lambda x: x[time, env], final_obs))
        at = (jnp.arange(steps)[:, None] == time) & open_rows
        return open_rows & ~at, jnp.where(at, one, next_value)

    _, next_value = jax.lax.while_loop(pending, read_one, (truncated.at[-1].set(False), next_value))
    return value, next_value


def _in_blocks(read: Callable[[Tree], Array], rows: Tree) -> Array:
    """`read` of many rows, some at a time: what a network leaves behind should not outgrow a CPU's caches."""
    number = jax.tree.leaves(rows)[0].shape[0]
    if (blocks := parts(number, BLOCK)) == 1:
        return read(rows)
    split = jax.tree.map(lambda x: x.reshape(blocks, -1, *x.shape[1:]), rows)
    return jax.lax.map(read, split).reshape(number)
