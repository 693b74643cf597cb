"""Convolutional network for small images: one 3x3 layer, as MinAtar's authors use, then an MLP.

Young & Tian 2019, arXiv:1903.03176. Leaves of the observation that are not images join after the
convolution. Larger images (64 pixels and more) pass through the three layers of Mnih et al. 2015.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from shoal.errors import ShoalError
from shoal.nets import ACTIVATIONS, INITS
from shoal.nets.inputs import image, image_shape, vector, vector_size
from shoal.nets.mlp import Layers, forward, normalised, normed, stack
from shoal.types import Array, Key, Net, Params, Space, Tree

SMALL = ((16, 3, 1),)  # (channels, kernel, stride) of each layer
LARGE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


class ConvNet(NamedTuple):
    convolutions: Layers  # eqx.nn.Conv2d, or Normed around one
    head: Layers


def _convolution(weight: Array, stride: int) -> eqx.nn.Conv2d:
    outputs, inputs, kernel, _ = weight.shape
    shape = jax.eval_shape(
        lambda key: eqx.nn.Conv2d(inputs, outputs, kernel, stride, key=key), jax.random.key(0)
    )
    return eqx.tree_at(lambda m: (m.weight, m.bias), shape, (weight, jnp.zeros((outputs, 1, 1), jnp.float32)))


def _convolve(layer: Any, x: Array) -> Array:
    """[B, H, W, C] -> [B, H', W', C'] as one matmul over patches.

    A convolution whose kernels differ per agent is lowered to a grouped convolution when vmapped, whose
    backward pass is slow on every backend; a matmul over patches becomes a batched matmul instead.
    """
    outputs, inputs, kernel, _ = layer.weight.shape
    stride = layer.stride[0]
    height, width = ((size - kernel) // stride + 1 for size in x.shape[1:3])
    patches = jnp.stack(
        [
            x[:, i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
            for i in range(kernel)
            for j in range(kernel)
        ],
        axis=3,
    )  # [B, H', W', K*K, C]
    weight = layer.weight.transpose(2, 3, 1, 0).reshape(kernel * kernel * inputs, outputs)
    return patches.reshape(*patches.shape[:3], -1) @ weight + layer.bias[:, 0, 0]


def make(
    obs_space: Space,
    outputs: int,
    scale: float,
    hidden: tuple[int, ...],
    activation: str,
    layer_norm: bool = False,
    init: str = "orthogonal",
) -> Net:
    """Convolutions over the images, then `hidden` layers over their features and all other leaves.

    `layer_norm` normalises the hidden layers, and each convolution over its channels at every place.
    """
    height, width, channels = image_shape(obs_space)
    plan = LARGE if min(height, width) >= 64 else SMALL
    others = vector_size(obs_space, images=False)
    features = others + plan[-1][0] * _final_area(height, width, plan)
    act = ACTIVATIONS[activation]

    def first(key: Key) -> Params:
        conv_key, head_key = jax.random.split(key)
        inputs = (channels, *(layer[0] for layer in plan[:-1]))
        shapes = [(outputs, c, kernel, kernel) for c, (outputs, kernel, _) in zip(inputs, plan)]
        draw, gain = INITS[init]
        weights = draw(conv_key, shapes, (gain,) * len(plan))
        layers: Layers = tuple(_convolution(weight, layer[2]) for weight, layer in zip(weights, plan))
        if layer_norm:
            layers = normed(layers, [layer[0] for layer in plan])
        return ConvNet(layers, stack(head_key, features, hidden, outputs, scale, layer_norm, init))

    def apply(params: Params, obs: Tree) -> Array:
        x = image(obs_space, obs)
        for layer in params.convolutions:
            x = _convolve(layer.linear, x) if layer_norm else _convolve(layer, x)
            x = act(normalised(layer, x, -1) if layer_norm else x)
        x = x.reshape(x.shape[0], -1)
        if others:
            x = jnp.concatenate([x, vector(obs_space, obs, images=False)], 1)
        return forward(params.head, x, activation)

    return Net(first, apply)


def _final_area(height: int, width: int, plan: tuple[tuple[int, int, int], ...]) -> int:
    for _, kernel, stride in plan:
        if min(height, width) < kernel:
            raise ShoalError(f"images of {height}x{width} are too small for a cnn", "use --net mlp")
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return height * width
