"""An env's params as arrays: written as Python numbers for people, carried as typed scalars by programs."""

from typing import TypeVar

import jax
import jax.numpy as jnp

P = TypeVar("P")


def as_arrays(params: P) -> P:
    """The same pytree with floats as float32 and integers as int32 scalars, never weakly typed.

    A weakly typed leaf would compile every program twice: once with it, once after a checkpoint.
    """
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if isinstance(x, float) else jnp.int32), params)
