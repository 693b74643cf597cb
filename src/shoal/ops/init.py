"""Weight initialisation that is safe inside a vmapped program."""

import jax
import jax.numpy as jnp

from shoal.types import Array, Key


def orthogonal(key: Key, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    """A scaled semi-orthogonal float32 matrix; axes after the first are one (rows = outputs).

    The polar factor of a Gaussian matrix is Haar-distributed. Newton-Schulz finds it by matmuls alone;
    LAPACK's batched QR can deadlock XLA's CPU thread pool and does not vmap well.
    """
    rows, columns = shape[0], 1
    for size in shape[1:]:
        columns *= size
    x = jax.random.normal(key, (rows, columns), jnp.float32)
    x = x if rows <= columns else x.T
    x = x / jnp.linalg.norm(x)

    def newton_schulz(_, x):
        return 1.5 * x - 0.5 * jnp.matmul(jnp.matmul(x, x.T, precision="highest"), x, precision="highest")

    x = jax.lax.fori_loop(0, 40, newton_schulz, x)
    return scale * (x if rows <= columns else x.T).reshape(shape)
