"""Action distributions for any action space; leading axes broadcast, all randomness is passed in.

A network gives `size` numbers per row. Spaces without state-dependent spread (Box) also own `free`
parameters, learned but not computed: the log standard deviations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.types import Array, Box, Discrete, Key, MultiDiscrete, Space, Tree, is_space

FORBIDDEN = -1e9  # the logit of a masked action: zero probability, yet finite, so that gradients are


def allowed(numbers: Array, mask: Array | None) -> Array:
    """Logits or values [..., A] with those of forbidden actions far below all others."""
    return numbers if mask is None else jnp.where(mask, numbers, FORBIDDEN)


def picked(table: Array, action: Array) -> Array:
    """One action's entry per row [...] of a table [A, ...]: compared, not gathered.

    Cheap for few actions, and fast in reverse on every backend.
    """
    number = jnp.arange(table.shape[0], dtype=jnp.int32).reshape(-1, *(1,) * action.ndim)
    return jnp.sum(jnp.where(number == action, table, 0.0), 0)


class Distribution(NamedTuple):
    """Over one action space. `mask` is True where an action is allowed, or None.

    A `sample` is what the density is of; `action` makes of it what the env is given (Box: rescaled).
    """

    size: int  # network outputs per row
    free: Tree  # initial values of the parameters that do not depend on the observation
    noise: Callable[[Key, int], Tree]  # (key, T) -> [T, …]
    sample: Callable[[Array, Tree, Tree, Tree], Tree]  # (outputs, free, mask, noise or None = the mode)
    log_prob: Callable[[Array, Tree, Tree, Tree], Array]  # (outputs, free, mask, sample)
    entropy: Callable[[Array, Tree, Tree], Array]  # (outputs, free, mask)
    action: Callable[[Tree], Tree]  # sample -> action


def distribution(space: Space) -> Distribution:
    """The usual distribution over `space`: categorical, Gaussian, or a product over a pytree."""
    structure: Any
    leaves, structure = jax.tree.flatten(space, is_leaf=is_space)
    parts = [_gaussian(leaf) if isinstance(leaf, Box) else _categorical(leaf) for leaf in leaves]
    if structure == jax.tree.structure(0):  # the space is a single leaf
        return parts[0]
    return _product(parts, structure.unflatten)


def _categorical(space: Discrete | MultiDiscrete) -> Distribution:
    sizes = space.nvec if isinstance(space, MultiDiscrete) else (space.n,)
    cuts = np.cumsum(sizes)[:-1].tolist()
    single = isinstance(space, Discrete)

    def split(x: Array, axis: int) -> list[Array]:
        return [x] if single else jnp.split(x, cuts, axis)

    def log_probs(outputs: Array, mask: Array | None) -> list[Array]:
        """[actions, …]: sums over a leading axis run along the rows, many at a time."""
        logits = jnp.moveaxis(allowed(outputs, mask), -1, 0)
        return [jax.nn.log_softmax(part, 0) for part in split(logits, 0)]

    def noise(key: Key, steps: int) -> Array:
        return jax.random.gumbel(key, (steps, sum(sizes)), jnp.float32)

    def sample(outputs, free, mask, noise):
        logits = allowed(outputs, mask)
        scores = logits if noise is None else logits + noise  # the Gumbel-max trick
        picks = [jnp.argmax(part, -1).astype(jnp.int32) for part in split(scores, -1)]
        return picks[0] if single else jnp.stack(picks, -1)

    def log_prob(outputs, free, mask, sample):
        picks = [sample] if single else [sample[..., i] for i in range(len(sizes))]
        return sum(picked(part, pick) for part, pick in zip(log_probs(outputs, mask), picks))

    def entropy(outputs, free, mask):
        return sum(-jnp.sum(jnp.exp(part) * part, 0) for part in log_probs(outputs, mask))

    return Distribution(sum(sizes), (), noise, sample, log_prob, entropy, lambda sample: sample)


def _gaussian(space: Box) -> Distribution:
    """A diagonal Gaussian in units of the space's half range, so that it starts by covering the range."""
    size = int(np.prod(space.shape))
    shape = space.shape
    low = np.broadcast_to(np.asarray(space.low, np.float32), shape)
    high = np.broadcast_to(np.asarray(space.high, np.float32), shape)
    # Without bounds the range counts as -1 … 1: an action is its sample. The largest float is no bound.
    limit = np.finfo(np.float32).max / 4
    bounded = (low > -limit) & (high < limit)
    bottom, top = np.where(bounded, low, -1), np.where(bounded, high, 1)
    middle, half = ((top + bottom) / 2).astype(np.float32), ((top - bottom) / 2).astype(np.float32)

    def noise(key: Key, steps: int) -> Array:
        return jax.random.normal(key, (steps, size), jnp.float32)

    def sample(outputs, free, mask, noise):
        return outputs if noise is None else outputs + jnp.exp(free) * noise

    def log_prob(outputs, free, mask, sample):
        standard = (sample - outputs) * jnp.exp(-free)
        return -jnp.sum(0.5 * jnp.square(standard) + free + 0.5 * np.float32(np.log(2 * np.pi)), -1)

    def entropy(outputs, free, mask):
        one = jnp.sum(free + 0.5 * np.float32(np.log(2 * np.pi * np.e)), -1)
        return jnp.broadcast_to(one, outputs.shape[:-1])

    def action(sample):
        sample = sample.reshape(*sample.shape[:-1], *shape)
        return jnp.clip(middle + half * sample, low, high).astype(space.dtype)

    return Distribution(size, jnp.zeros((size,), jnp.float32), noise, sample, log_prob, entropy, action)


def _product(parts: list[Distribution], wrap: Callable[[list], Any]) -> Distribution:
    cuts = np.cumsum([part.size for part in parts])[:-1].tolist()

    def split(outputs: Array) -> list[Array]:
        return jnp.split(outputs, cuts, axis=-1)

    def spread(mask: Tree) -> list:
        return [None] * len(parts) if mask is None else jax.tree.leaves(mask, is_leaf=lambda x: x is None)

    def leaves(tree: Tree) -> list:
        return [None] * len(parts) if tree is None else jax.tree.leaves(tree)

    def noise(key, steps):
        return [part.noise(k, steps) for part, k in zip(parts, jax.random.split(key, len(parts)))]

    def sample(outputs, free, mask, noise):
        rows = zip(parts, split(outputs), free, spread(mask), leaves(noise))
        return wrap([part.sample(*row) for part, *row in rows])

    def log_prob(outputs, free, mask, sample):
        rows = zip(parts, split(outputs), free, spread(mask), leaves(sample))
        return sum(part.log_prob(*row) for part, *row in rows)

    def entropy(outputs, free, mask):
        return sum(part.entropy(*row) for part, *row in zip(parts, split(outputs), free, spread(mask)))

    def action(sample):
        return wrap([part.action(leaf) for part, leaf in zip(parts, leaves(sample))])

    size, free = sum(part.size for part in parts), [part.free for part in parts]
    return Distribution(size, free, noise, sample, log_prob, entropy, action)
