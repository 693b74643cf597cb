"""From an observation, whatever its space, to the float arrays a network reads."""

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import ShoalError
from shoal.types import Array, Box, Discrete, MultiDiscrete, Space, Tree, is_space


def _leaves(space: Space) -> list:
    return jax.tree.leaves(space, is_leaf=is_space)


def _is_image(space: Space) -> bool:
    """Height x width x channels."""
    return isinstance(space, Box) and len(space.shape) == 3


def has_images(space: Space) -> bool:
    return any(map(_is_image, _leaves(space)))


def _flat_size(space: Space) -> int:
    if isinstance(space, Discrete):
        return space.n
    return sum(space.nvec) if isinstance(space, MultiDiscrete) else int(np.prod(space.shape))


def _flat(space: Space, obs: Array) -> Array:
    """One leaf as float rows: integers one-hot, boxes flattened, bytes scaled to 0 … 1."""
    if isinstance(space, Discrete):
        return jax.nn.one_hot(obs, space.n)
    if isinstance(space, MultiDiscrete):
        return jnp.concatenate([jax.nn.one_hot(obs[:, i], n) for i, n in enumerate(space.nvec)], 1)
    return _as_float(obs).reshape(obs.shape[0], -1)


def _as_float(obs: Array) -> Array:
    return obs.astype(jnp.float32) / 255.0 if obs.dtype == jnp.uint8 else obs.astype(jnp.float32)


def vector_size(space: Space, images: bool = True) -> int:
    """Columns that `vector` gives; with images=False those of the other leaves only."""
    return sum(_flat_size(leaf) for leaf in _leaves(space) if images or not _is_image(leaf))


def vector(space: Space, obs: Tree, images: bool = True) -> Array:
    """All leaves of a batch of observations side by side, float32 [B, vector_size]."""
    pairs = zip(_leaves(space), jax.tree.leaves(obs))
    rows = [_flat(leaf, x) for leaf, x in pairs if images or not _is_image(leaf)]
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, 1)


def image_shape(space: Space) -> tuple[int, int, int]:
    """Height, width and all images' channels together; images of one observation share their size."""
    shapes = [leaf.shape for leaf in _leaves(space) if _is_image(leaf)]
    if len({shape[:2] for shape in shapes}) != 1:
        raise ShoalError(
            f"a cnn reads one or more images [H, W, C] of one size, not {shapes}", "use --net mlp"
        )
    return (*shapes[0][:2], sum(shape[2] for shape in shapes))


def image(space: Space, obs: Tree) -> Array:
    """The images of a batch of observations, channels side by side, float32 [B, H, W, C]."""
    pairs = zip(_leaves(space), jax.tree.leaves(obs))
    images = [_as_float(x) for leaf, x in pairs if _is_image(leaf)]
    return images[0] if len(images) == 1 else jnp.concatenate(images, -1)
