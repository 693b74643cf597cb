"""Actions within bounds, and a Gaussian squashed into them (Haarnoja et al. 2018, arXiv:1812.05905, app. C).

An action is a vector [size] of numbers in -1 … 1, one for each entry of the space, whatever its units; only
the env is given the scaled one. Densities are of the vector, so an entropy means the same in any unit.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import ShoalError
from shoal.types import Array, Box, Space, Tree, is_space

LOG_STD = (-5.0, 2.0)  # bounds of the log standard deviation before squashing


class Bounded(NamedTuple):
    """A space of bounded floats as vectors."""

    size: int
    action: Callable[[Array], Tree]  # [..., size] in -1 … 1 -> what the env is given


def bounded(space: Space, algo: str) -> Bounded:
    """`space` as vectors; ShoalError unless it is a Box of bounded floats, or a pytree of such boxes."""
    structure: Any
    leaves, structure = jax.tree.flatten(space, is_leaf=is_space)
    for leaf in leaves:
        _check(leaf, algo)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    cuts = np.cumsum(sizes)[:-1].tolist()

    def action(vector: Array) -> Tree:
        parts = jnp.split(vector, cuts, axis=-1)
        return structure.unflatten([_scaled(leaf, part) for leaf, part in zip(leaves, parts)])

    return Bounded(sum(sizes), action)


def _check(leaf: Any, algo: str) -> None:
    if not isinstance(leaf, Box) or not np.issubdtype(leaf.dtype, np.floating):
        kind = f"a Box of {leaf.dtype}" if isinstance(leaf, Box) else f"{type(leaf).__name__}"
        raise ShoalError(f"{algo} needs continuous actions, and here is {kind}", "try --algo ppo")
    # The largest float is another way to write "no bound".
    widest = max(np.max(np.abs(leaf.low), initial=0), np.max(np.abs(leaf.high), initial=0))
    if not widest < np.finfo(np.float32).max / 4:
        raise ShoalError(
            f"{algo} scales actions to their bounds, and here some have none: {leaf.low} … {leaf.high}",
            "give the env's action space finite bounds, or try --algo ppo",
        )


def _scaled(leaf: Box, part: Array) -> Array:
    low, high = (np.broadcast_to(np.asarray(x, np.float32), leaf.shape) for x in (leaf.low, leaf.high))
    part = part.reshape(*part.shape[:-1], *leaf.shape)
    return jnp.clip((low + high) / 2 + (high - low) / 2 * part, low, high).astype(leaf.dtype)


def uniform(noise: Array) -> Array:
    """Standard normal noise as uniform noise in -1 … 1."""
    return jax.lax.erf(noise * math.sqrt(0.5))


def squashed(outputs: Array, noise: Array | None) -> tuple[Array, Array]:
    """A draw [..., size], and the log of its density [...], from a network's outputs [..., 2 * size].

    Outputs are means and log deviations, the latter bent into their bounds by a tanh, so that a gradient is
    left at a bound. noise: standard normal [..., size], or None for the squashed mean, with its own density.
    """
    mean, spread = jnp.split(outputs, 2, axis=-1)
    low, high = LOG_STD
    log_std = low + 0.5 * (high - low) * (1 + jnp.tanh(spread))
    noise = jnp.zeros_like(mean) if noise is None else noise
    raw = mean + jnp.exp(log_std) * noise
    # log(1 - tanh²(x)) = 2 (log 2 - x - softplus(-2 x)), exact where tanh has already rounded to ±1.
    slope = 2 * (math.log(2) - raw - jax.nn.softplus(-2 * raw))
    normal = -0.5 * jnp.square(noise) - log_std - 0.5 * math.log(2 * math.pi)
    return jnp.tanh(raw), jnp.sum(normal - slope, -1)
