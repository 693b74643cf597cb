"""Acting on action values [..., A] of a Discrete space: the best, or now and then any allowed action."""

import jax
import jax.numpy as jnp

from shoal.ops.distributions import allowed, picked
from shoal.types import Array, Key


def taken(q: Array, action: Array) -> Array:
    """The value of one action per row [...]."""
    return picked(jnp.moveaxis(q, -1, 0), action)


def exploration_noise(key: Key, steps: int) -> Array:
    """What `epsilon_greedy` needs at random, [T, 2]: whether to explore, and where to."""
    return jax.random.uniform(key, (steps, 2), jnp.float32)


def epsilon_greedy(q: Array, mask: Array | None, epsilon: Array, noise: Array | None) -> Array:
    """The best allowed action, int32 [...]; with chance `epsilon` any allowed one. No noise: the best."""
    best = jnp.argmax(allowed(q, mask), -1).astype(jnp.int32)
    if noise is None:
        return best
    explores, share = noise[..., 0] < epsilon, noise[..., 1]
    if mask is None:
        anyone = jnp.floor(share * q.shape[-1]).astype(jnp.int32)
    else:  # the allowed action that lies at this share of them all
        rank = jnp.floor(share * jnp.sum(mask, -1))
        anyone = jnp.argmax(jnp.cumsum(mask, -1) > rank[..., None], -1).astype(jnp.int32)
    return jnp.where(explores, anyone, best)


def annealed(start: Array | float, end: Array | float, fraction: Array | float, progress: Array) -> Array:
    """From `start` linearly to `end` over this fraction of the budget, then `end`."""
    return start + (end - start) * jnp.clip(progress / jnp.maximum(fraction, 1e-6), 0.0, 1.0)
