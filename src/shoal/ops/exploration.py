"""Acting on action values of a Discrete space: greedy, or now and then any allowed action."""

import jax
import jax.numpy as jnp

from shoal.ops.distributions import FORBIDDEN
from shoal.types import Array, Key


def allowed(q: Array, mask: Array | None) -> Array:
    """Action values [..., A] with forbidden actions below all others, so that max and argmax pass them by."""
    return q if mask is None else jnp.where(mask, q, FORBIDDEN)


def explorer(actions: int):
    """What `epsilon_greedy` needs at random: (key, T) -> [T, 1 + A], whether to explore, and where to."""

    def noise(key: Key, steps: int) -> Array:
        return jax.random.uniform(key, (steps, 1 + actions), jnp.float32)

    return noise


def epsilon_greedy(q: Array, mask: Array | None, epsilon: Array, noise: Array | None) -> Array:
    """The best allowed action, int32 [...]; with chance `epsilon` any allowed one. No noise: the best."""
    best = jnp.argmax(allowed(q, mask), -1).astype(jnp.int32)
    if noise is None:
        return best
    anyone = jnp.argmax(allowed(noise[..., 1:], mask), -1).astype(jnp.int32)
    return jnp.where(noise[..., 0] < epsilon, anyone, best)


def annealed(start: Array, end: Array, fraction: Array, progress: Array) -> Array:
    """From `start` linearly to `end` over this fraction of the budget, then `end`."""
    return start + (end - start) * jnp.clip(progress / jnp.maximum(fraction, 1e-6), 0.0, 1.0)
