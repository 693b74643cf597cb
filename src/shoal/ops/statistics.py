"""Running mean and variance of trees of floats (Chan, Golub & LeVeque 1983), global over a data axis."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.types import WHOLE, Array, Axis, Tree


class Moments(NamedTuple):
    """One entry per floating leaf of the tree observed; leaves of other dtypes are left alone."""

    count: Array  # type: ignore[assignment]  # [] samples so far
    mean: tuple[Array, ...]
    m2: tuple[Array, ...]  # sums of squared deviations from the mean


def _floats(tree: Tree) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def no_moments(like: Tree) -> Moments:
    """Moments of nothing yet, for samples shaped like the leaves of `like`."""
    zeros = tuple(jnp.zeros(leaf.shape, jnp.float32) for leaf in _floats(like))
    return Moments(jnp.zeros((), jnp.float32), zeros, zeros)


def observe(moments: Moments, samples: Tree, lead: int = 1, axis: Axis = WHOLE) -> Moments:
    """Moments after seeing `samples`, whose leaves have `lead` leading sample axes."""
    leaves = _floats(samples)
    if not leaves:
        return moments
    axes = tuple(range(lead))
    number = leaves[0].size / max(1, leaves[0][(0,) * lead].size)
    number = axis.sum(jnp.float32(number))
    mean = [total / number for total in axis.sum([jnp.sum(leaf, axes) for leaf in leaves])]
    m2 = axis.sum([jnp.sum(jnp.square(leaf - centre), axes) for leaf, centre in zip(leaves, mean)])
    count = moments.count + number
    shift = [new - old for new, old in zip(mean, moments.mean)]
    return Moments(
        count,
        tuple(old + d * (number / count) for old, d in zip(moments.mean, shift)),
        tuple(
            a + b + jnp.square(d) * (moments.count * number / count) for a, b, d in zip(moments.m2, m2, shift)
        ),
    )


def variance(moments: Moments) -> tuple[Array, ...]:
    """Population variance of each leaf; 1 before the first sample."""
    seen = moments.count > 0
    return tuple(jnp.where(seen, m2 / jnp.maximum(moments.count, 1.0), 1.0) for m2 in moments.m2)


def normalize(moments: Moments, tree: Tree, limit: float = 10.0) -> Tree:
    """(x - mean) / std of every floating leaf, clipped to ±limit; axes may lead the observed shape."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = iter(zip(moments.mean, variance(moments)))

    def scaled(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        mean, var = next(pairs)
        lead = (1,) * (leaf.ndim - mean.ndim)
        mean, var = mean.reshape(lead + mean.shape), var.reshape(lead + var.shape)
        return jnp.clip((leaf - mean) * jax.lax.rsqrt(var + 1e-8), -limit, limit)

    return jax.tree.unflatten(structure, [scaled(leaf) for leaf in leaves])
