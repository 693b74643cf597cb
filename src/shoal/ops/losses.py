"""Loss terms per row; sums and means are the caller's."""

import jax.numpy as jnp

from shoal.types import Array


def clipped_surrogate(ratio: Array, advantage: Array, clip: Array | float) -> Array:
    """The loss form of PPO's objective (Schulman et al. 2017, eq. 7), per row."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)


def squared_error(value: Array, target: Array) -> Array:
    return 0.5 * jnp.square(value - target)


def clipped_squared_error(value: Array, old_value: Array, target: Array, clip: Array | float) -> Array:
    """The value loss of OpenAI Baselines' PPO2: the worse of the free and the clipped prediction."""
    near = old_value + jnp.clip(value - old_value, -clip, clip)
    return jnp.maximum(squared_error(value, target), squared_error(near, target))
