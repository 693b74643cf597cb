"""Multi-layer perceptron on Equinox linear layers, computed features-first when rows are many.

With activations as [features, rows] the weight gradient is a product of contiguous rows, which XLA's
CPU backend runs up to twice as fast (docs/adr/0002). A few rows, as in acting, are best left rows-first.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from shoal.nets import ACTIVATIONS, HIDDEN_GAIN
from shoal.nets.inputs import vector, vector_size
from shoal.ops.init import orthogonals
from shoal.types import Array, Key, Net, Params, Space, Tree

MANY_ROWS = 32

Layers = tuple[Any, ...]  # eqx.nn.Linear, whose bias is typed as optional and here never is


def linear(weight: Array) -> eqx.nn.Linear:
    """An Equinox layer with this weight [outputs, inputs], and no bias at the start."""
    outputs, inputs = weight.shape
    shape = jax.eval_shape(lambda key: eqx.nn.Linear(inputs, outputs, key=key), jax.random.key(0))
    return eqx.tree_at(lambda m: (m.weight, m.bias), shape, (weight, jnp.zeros((outputs,), jnp.float32)))


def stack(
    key: Key, inputs: int, hidden: tuple[int, ...], outputs: int, scale: float
) -> tuple[eqx.nn.Linear, ...]:
    """Linear layers inputs → hidden … → outputs with orthogonal weights (Andrychowicz et al. 2021).

    The last one's weights are scaled by `scale`.
    """
    sizes = (inputs, *hidden, outputs)
    gains = (HIDDEN_GAIN,) * len(hidden) + (scale,)
    return tuple(map(linear, orthogonals(key, list(zip(sizes[1:], sizes[:-1])), gains)))


def forward(layers: Layers, x: Array, activation: str) -> Array:
    """[B, inputs] -> [B, outputs]."""
    act = ACTIVATIONS[activation]
    *hidden, last = layers
    if x.shape[0] < MANY_ROWS:
        for layer in hidden:
            x = act(x @ layer.weight.T + layer.bias)
        return x @ last.weight.T + last.bias
    x = x.T
    for layer in hidden:
        x = act(layer.weight @ x + layer.bias[:, None])
    return (last.weight @ x + last.bias[:, None]).T


def make(obs_space: Space, outputs: int, scale: float, hidden: tuple[int, ...], activation: str) -> Net:
    """Every leaf of the observation, flattened and side by side, through `hidden` layers."""

    def init(key: Key) -> Params:
        return stack(key, vector_size(obs_space), hidden, outputs, scale)

    def apply(params: Params, obs: Tree) -> Array:
        return forward(params, vector(obs_space, obs), activation)

    return Net(init, apply)
