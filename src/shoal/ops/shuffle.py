"""Shuffling without a sort: a keyed bijection of 0 … n - 1.

`jax.random.permutation` sorts, which costs a third of a PPO update on a CPU. A Feistel network over
mixed radices Z_a x Z_b (Black & Rogaway 2002, "Ciphers with arbitrary finite domains") maps each index
on its own, so it costs a few integer operations a row.
"""

import math

import jax
import jax.numpy as jnp

from shoal.errors import ShoalError
from shoal.types import Array, Axis, Key

ROUNDS = 6
MOST_STRATA = 8


def _radices(n: int) -> tuple[int, int]:
    """The smallest domain a * b >= n that is nearly square; balanced halves mix well."""
    size = max(n, 4)
    while True:
        a = next(a for a in range(math.isqrt(size), 0, -1) if size % a == 0)
        if 4 * a * a >= size:
            return a, size // a
        size += 1


def _hash(x: Array, key: Array) -> Array:
    """A 32-bit finaliser (after MurmurHash3) of x under a round key."""
    x = (x ^ key) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def permutation(key: Key, n: int) -> Array:
    """A pseudo-random permutation of 0 … n - 1, int32 [n]."""
    a, b = _radices(n)
    keys = jax.random.bits(key, (2 * ROUNDS,), jnp.uint32)

    def encrypt(x):
        left, right = x // b, x % b
        for i in range(ROUNDS):
            left = (left + _hash(right, keys[2 * i]) % a) % a
            right = (right + _hash(left, keys[2 * i + 1]) % b) % b
        return left * b + right

    x = encrypt(jnp.arange(n, dtype=jnp.uint32))
    # Values beyond n walk on along their cycle until they are back inside; there are a * b - n of them.
    for _ in range(a * b - n):
        x = jnp.where(x >= n, encrypt(x), x)
    return x.astype(jnp.int32)


# --- Minibatches of a rollout -----------------------------------------------------------------


def check_minibatches(group: str, num_envs: int, num_steps: int, minibatches: int) -> None:
    """ShoalError unless a rollout of these sizes can be cut into so many equal minibatches."""
    rows = num_envs * num_steps
    if rows >= 2**31:
        raise ShoalError(f"num_envs * num_steps = {rows:,} must be below {2**31:,}", "use fewer")
    if rows % minibatches:
        small = [m for m in range(1, math.isqrt(rows) + 1) if rows % m == 0]
        divisors = {*small, *(rows // m for m in small)}
        near = sorted(divisors, key=lambda m: (abs(m - minibatches), m))[:2]
        raise ShoalError(
            f"num_envs * num_steps = {rows} is not divisible by minibatches = {minibatches}",
            f"try --{group}.minibatches {' or '.join(map(str, sorted(near)))}",
        )


def strata(num_envs: int, rows: int) -> int:
    """Groups of envs that are shuffled or drawn from apart, each with an equal share of a minibatch's rows.

    Devices divide strata, so rows never cross devices, and where envs live does not change minibatches.
    """
    return max(s for s in range(1, min(num_envs, MOST_STRATA) + 1) if num_envs % s == rows % s == 0)


def minibatch_rows(
    key: Key, num_envs: int, num_steps: int, epochs: int, minibatches: int, axis: Axis
) -> Array:
    """Which rows of a rollout flattened from [T, B here] each minibatch reads: int32 [epochs * M, n here].

    Every epoch visits every row once, in an order of its own. num_envs counts the envs of all shares.
    """
    groups = strata(num_envs, num_envs * num_steps // minibatches) // axis.size  # on this share
    envs = num_envs // axis.size // groups  # per stratum
    stratum = jnp.arange(groups, dtype=jnp.int32)

    def epoch(key):
        def one(s):
            where = permutation(jax.random.fold_in(key, axis.index * groups + s), num_steps * envs)
            time, env = where // envs, where % envs
            return (time * groups + s) * envs + env  # env groups are neighbours

        return jax.vmap(one)(stratum).reshape(groups, minibatches, -1)

    # A loop over epochs keeps the index arithmetic from being fused into, and repeated by, each gather.
    index = jax.lax.map(epoch, jax.random.split(key, epochs))  # [epochs, strata, M, n]
    return index.transpose(0, 2, 1, 3).reshape(epochs * minibatches, -1)
