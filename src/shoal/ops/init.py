"""Weight initialisation that is safe inside a vmapped program, and quick to compile."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shoal.types import Array, Key

CUT_DEVIATION = 0.87962566  # of a standard normal that is cut at two
ITERATIONS = 40  # a small singular value grows by half each time: from 1e-6 of the norm to 1


def orthogonal(key: Key, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    """A scaled semi-orthogonal float32 matrix; axes after the first are one (rows = outputs)."""
    return orthogonals(key, [shape], [scale])[0]


def orthogonals(key: Key, shapes: Sequence[tuple[int, ...]], scales: Sequence[float]) -> list[Array]:
    """Several such matrices from one draw and in one loop, which compile in the time of one matrix.

    The polar factor of a Gaussian matrix is Haar-distributed. Newton-Schulz finds it by matmuls alone;
    LAPACK's batched QR can deadlock XLA's CPU thread pool and does not vmap well.
    """
    sizes = [math.prod(shape) for shape in shapes]
    parts = jnp.split(jax.random.normal(key, (sum(sizes),), jnp.float32), np.cumsum(sizes)[:-1].tolist())
    matrices = [part.reshape(shape[0], -1) for part, shape in zip(parts, shapes)]
    wide = [x if x.shape[0] <= x.shape[1] else x.T for x in matrices]

    def newton_schulz(_, wide):
        return [1.5 * x - 0.5 * _product(_product(x, x.T), x) for x in wide]

    wide = jax.lax.fori_loop(0, ITERATIONS, newton_schulz, [x / jnp.linalg.norm(x) for x in wide])
    rows = zip(wide, matrices, shapes, scales)
    return [scale * (x if x.shape == m.shape else x.T).reshape(shape) for x, m, shape, scale in rows]


def lecun_normals(key: Key, shapes: Sequence[tuple[int, ...]], scales: Sequence[float]) -> list[Array]:
    """Several float32 matrices from one draw, each with variance scale^2 / inputs, cut at two deviations.

    LeCun et al. 1998, Efficient BackProp, eq. 16; outputs of unit variance, however many inputs there are.
    """
    sizes = [math.prod(shape) for shape in shapes]
    draw = jax.random.truncated_normal(key, -2.0, 2.0, (sum(sizes),), jnp.float32) / CUT_DEVIATION
    parts = jnp.split(draw, np.cumsum(sizes)[:-1].tolist())
    inputs = [math.prod(shape[1:]) for shape in shapes]
    return [x.reshape(s) * (c / math.sqrt(n)) for x, s, c, n in zip(parts, shapes, scales, inputs)]


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")
