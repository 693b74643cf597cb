"""Multi-layer perceptron on Equinox linear layers, computed features-first when rows are many.

With activations as [features, rows] the weight gradient is a product of contiguous rows, which is faster
on XLA's CPU backend (docs/performance.md). A few rows, as in acting, are best left rows-first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from shoal.nets import ACTIVATIONS, INITS
from shoal.nets.inputs import vector, vector_size
from shoal.types import Array, Key, Net, Params, Space, Tree

MANY_ROWS = 32


class Normed(NamedTuple):
    """A linear layer whose outputs are normalised over its units (Ba et al. 2016, arXiv:1607.06450)."""

    linear: Any
    gain: Array
    shift: Array


Layers = tuple[Any, ...]  # eqx.nn.Linear or Normed; a Linear's bias is typed as optional and here never is


def linear(weight: Array) -> eqx.nn.Linear:
    """An Equinox layer with this weight [outputs, inputs], and no bias at the start."""
    outputs, inputs = weight.shape
    shape = jax.eval_shape(lambda key: eqx.nn.Linear(inputs, outputs, key=key), jax.random.key(0))
    return eqx.tree_at(lambda m: (m.weight, m.bias), shape, (weight, jnp.zeros((outputs,), jnp.float32)))


def stack(
    key: Key,
    inputs: int,
    hidden: tuple[int, ...],
    outputs: int,
    scale: float,
    layer_norm: bool = False,
    init: str = "orthogonal",
) -> Layers:
    """Linear layers inputs → hidden … → outputs, drawn as `nets.INITS` says.

    The last one's weights are scaled by `scale`, and never normalised.
    """
    sizes, (draw, gain) = (inputs, *hidden, outputs), INITS[init]
    weights = draw(key, list(zip(sizes[1:], sizes[:-1])), (gain,) * len(hidden) + (scale,))
    *inner, last = map(linear, weights)
    return (*(normed(inner, hidden) if layer_norm else inner), last)


def normed(layers: Sequence[Any], units: Sequence[int]) -> Layers:
    """Layers whose outputs are normalised over their units."""
    zeros = [jnp.zeros((number,), jnp.float32) for number in units]
    return tuple(Normed(layer, 1 + zero, zero) for layer, zero in zip(layers, zeros))


def forward(layers: Layers, x: Array, activation: str) -> Array:
    """[B, inputs] -> [B, outputs]."""
    act = ACTIVATIONS[activation]
    *hidden, last = layers
    if x.shape[0] < MANY_ROWS:
        for layer in hidden:
            x = act(_hidden(layer, x, 1))
        return x @ last.weight.T + last.bias
    x = x.T
    for layer in hidden:
        x = act(_hidden(layer, x, 0))
    return affine(last.weight, last.bias, x).T


@jax.custom_vjp
def affine(weight: Array, bias: Array, x: Array) -> Array:
    """weight [outputs, inputs] @ x [inputs, B] + bias, with a gradient that stays features-first.

    What autodiff makes of it gives the gradient of x as [B, inputs], which the next operation reads across,
    and sums the bias' over the rows one by one: together a third of a 64-64 network's gradient on a CPU.
    """
    return weight @ x + bias[:, None]


def _affine_forward(weight: Array, bias: Array, x: Array):
    return affine(weight, bias, x), (weight, x)


def _affine_backward(saved: tuple[Array, Array], slope: Array):
    weight, x = saved
    contract = lambda a, b, axis: jax.lax.dot_general(a, b, (((axis,), (axis,)), ((), ())))
    ones = jnp.ones((slope.shape[1],), slope.dtype)
    return contract(slope, x, 1), slope @ ones, contract(weight, slope, 0)


affine.defvjp(_affine_forward, _affine_backward)


def _hidden(layer: Any, x: Array, units: int) -> Array:
    """One layer before its activation; `units`: the axis of x, [B, inputs] or [inputs, B], that it reads."""
    linear = layer.linear if isinstance(layer, Normed) else layer
    x = affine(linear.weight, linear.bias, x) if units == 0 else x @ linear.weight.T + linear.bias
    return normalised(layer, x, units) if isinstance(layer, Normed) else x


def normalised(layer: Normed, x: Array, units: int) -> Array:
    """x with mean 0 and variance 1 over the axis `units`, then scaled and shifted per unit."""
    shape = [1] * x.ndim
    shape[units] = -1
    centred = x - jnp.mean(x, units, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), units, keepdims=True) + 1e-5)
    return centred * scale * layer.gain.reshape(shape) + layer.shift.reshape(shape)


def make(
    obs_space: Space,
    outputs: int,
    scale: float,
    hidden: tuple[int, ...],
    activation: str,
    layer_norm: bool = False,
    init: str = "orthogonal",
) -> Net:
    """Every leaf of the observation, flattened and side by side, through `hidden` layers."""

    def first(key: Key) -> Params:
        return stack(key, vector_size(obs_space), hidden, outputs, scale, layer_norm, init)

    def apply(params: Params, obs: Tree) -> Array:
        return forward(params, vector(obs_space, obs), activation)

    return Net(first, apply)
