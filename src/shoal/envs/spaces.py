"""What can be done with a space: a pytree whose leaves are Box, Discrete and MultiDiscrete.

All functions take such a tree and work leaf by leaf; `sample`, `contains` and `zeros` can be traced.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.types import Array, Box, Discrete, Key, MultiDiscrete, Space, Tree, is_space


def sample(key: Key, space: Space, mask: Tree = None) -> Tree:
    """A random element: uniform where bounded, normal (or half-normal) where a float has no bound.

    `mask` is what an env's `action_mask` returned for this space, see `mask_space`.
    """
    leaves, tree = jax.tree.flatten(space, is_leaf=is_space)
    keys = jax.tree.unflatten(tree, list(jax.random.split(key, max(len(leaves), 1)))[: len(leaves)])
    if mask is None:
        return jax.tree.map(_sample, keys, space, is_leaf=is_space)
    return jax.tree.map(_sample_masked, keys, space, mask, is_leaf=is_space)


def zeros(space: Space) -> Tree:
    """Zeros of the right shapes and dtypes: a template, not always an element."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), space, is_leaf=is_space)


def contains(space: Space, x: Tree) -> Array:
    """bool []: same tree, shapes and dtypes, and every number within its bounds (NaN never is)."""
    tree: Any = jax.tree.structure(space, is_leaf=is_space)
    if jax.tree.structure(x) != tree:
        return jnp.bool_(False)
    inside = jax.tree.map(_contains, space, x, is_leaf=is_space)
    return jax.tree.reduce(jnp.logical_and, inside, jnp.bool_(True))


def mask_space(space: Space) -> Space:
    """The space of action masks: bool [n] for Discrete, [n0 + n1 + …] for MultiDiscrete."""
    sizes = jax.tree.map(lambda leaf: sum(_choices(leaf)), space, is_leaf=is_space)
    return jax.tree.map(lambda n: Box(False, True, (n,), bool), sizes)


def mask_rows(leaf: Space, mask: Array) -> list[Array]:
    """The mask of each entry of one leaf's action: one bool [n] for Discrete, several for MultiDiscrete."""
    return jnp.split(mask, np.cumsum(_choices(leaf))[:-1])


def bounds(leaf: Space) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest value of one leaf, broadcast to its shape, in its dtype."""
    if isinstance(leaf, Box):
        low, high = leaf.low, leaf.high
    elif isinstance(leaf, MultiDiscrete):
        low, high = 0, np.asarray(leaf.nvec) - 1
    else:
        low, high = 0, leaf.n - 1
    low, high = np.asarray(low, leaf.dtype), np.asarray(high, leaf.dtype)
    return np.broadcast_to(low, leaf.shape), np.broadcast_to(high, leaf.shape)


def describe(space: Space) -> str:
    """One line for people: `{'arm': Box float32 [3] in -1 … 1, 'grip': Discrete 2}`."""
    if isinstance(space, Box):
        low, high = float(np.min(space.low)), float(np.max(space.high))
        return f"Box {space.dtype} {list(space.shape)} in {low:g} … {high:g}"
    if isinstance(space, Discrete):
        return f"Discrete {space.n}"
    if isinstance(space, MultiDiscrete):
        return f"MultiDiscrete {list(space.nvec)}"
    if isinstance(space, dict):
        return "{" + ", ".join(f"{name!r}: {describe(part)}" for name, part in space.items()) + "}"
    return "(" + ", ".join(describe(part) for part in space) + ")"


def to_json(space: Space) -> dict:
    """A strict-JSON description (infinities as strings) from which `from_json` rebuilds an equal space."""
    if isinstance(space, Box):
        low, high = _encode(space.low), _encode(space.high)
        return {"box": {"low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}}
    if isinstance(space, Discrete):
        return {"discrete": space.n}
    if isinstance(space, MultiDiscrete):
        return {"multi_discrete": list(space.nvec)}
    if isinstance(space, dict) and all(isinstance(name, str) for name in space):
        return {"dict": {name: to_json(part) for name, part in space.items()}}
    if type(space) in (tuple, list):
        return {type(space).__name__: [to_json(part) for part in space]}
    raise TypeError(
        f"cannot describe a space of type {type(space).__name__}: {space!r}; "
        "build it from Box, Discrete, MultiDiscrete, tuples, lists and dicts with string keys"
    )


def from_json(description: dict) -> Space:
    """The space that `to_json` described."""
    [(kind, value)] = description.items()
    if kind == "box":
        low, high = _decode(value["low"]), _decode(value["high"])
        return Box(low, high, tuple(value["shape"]), value["dtype"])
    if kind == "discrete":
        return Discrete(value)
    if kind == "multi_discrete":
        return MultiDiscrete(tuple(value))
    if kind == "dict":
        return {name: from_json(part) for name, part in value.items()}
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](from_json(part) for part in value)
    raise ValueError(f"unknown kind of space {kind!r}; this file may come from a newer version of shoal")


def _sample(key: Key, leaf: Space) -> Array:
    low, high = bounds(leaf)
    if leaf.dtype == bool:
        return jax.random.bernoulli(key, 0.5, leaf.shape) & high | low
    if np.issubdtype(leaf.dtype, np.integer):
        return _sample_integers(key, leaf, low.astype(np.int64), high.astype(np.int64))
    limit = jnp.finfo(leaf.dtype).max / 4  # the largest float is another way to write "no bound"
    below, above = low > -limit, high < limit
    span = (np.where(below, low, 0), np.where(above, high, 0))
    if (below & above).all():
        return jax.random.uniform(key, leaf.shape, leaf.dtype, *span)
    uniform_key, tail_key = jax.random.split(key)
    uniform = jax.random.uniform(uniform_key, leaf.shape, leaf.dtype, *span)
    tail = jax.random.normal(tail_key, leaf.shape, leaf.dtype)
    half = jnp.where(below, low + jnp.abs(tail), jnp.where(above, high - jnp.abs(tail), tail))
    return jnp.where(below & above, uniform, half)


def _sample_integers(key: Key, leaf: Space, low: np.ndarray, high: np.ndarray) -> Array:
    """One word per number, half of what `randint` takes; the bias is below 1 in 2^32 / span."""
    span = np.minimum(high - low + 1, 2**32 - 1).astype(np.uint32)
    offset = jax.random.bits(key, leaf.shape, jnp.uint32) % span
    return (low.astype(np.uint32) + offset).astype(leaf.dtype)  # wraps around to negative numbers


def _sample_masked(key: Key, leaf: Space, mask: Array) -> Array:
    rows = mask_rows(leaf, mask)
    keys = jax.random.split(key, len(rows))
    picks = [jax.random.categorical(k, jnp.where(row, 0.0, -jnp.inf)) for k, row in zip(keys, rows)]
    return jnp.stack(picks).reshape(leaf.shape).astype(leaf.dtype)


def _choices(leaf: Space) -> tuple[int, ...]:
    if isinstance(leaf, Box):
        raise TypeError("a Box cannot be masked; only Discrete and MultiDiscrete actions can")
    return leaf.nvec if isinstance(leaf, MultiDiscrete) else (leaf.n,)


def _contains(leaf: Space, x: Any) -> Array:
    if jnp.shape(x) != leaf.shape or jnp.result_type(x) != leaf.dtype:
        return jnp.bool_(False)
    low, high = bounds(leaf)
    return jnp.all((low <= x) & (x <= high))


def _encode(bound: Any) -> Any:
    if isinstance(bound, tuple):
        return [_encode(part) for part in bound]
    return str(bound) if isinstance(bound, float) and math.isinf(bound) else bound


def _decode(bound: Any) -> Any:
    if isinstance(bound, list):
        return tuple(_decode(part) for part in bound)
    return float(bound) if isinstance(bound, str) else bound
