"""The convolution as a matmul over patches equals XLA's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.nets.cnn import ConvNet, _convolution, _convolve, make
from shoal.nets.mlp import forward
from shoal.types import Box, Discrete


def reference(layer, x):
    y = jax.lax.conv_general_dilated(
        x, layer.weight, layer.stride, "VALID", dimension_numbers=("NHWC", "OIHW", "NHWC")
    )
    return y + layer.bias[:, 0, 0]


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("size", "kernel", "stride"), [((10, 10), 3, 1), ((9, 7), 3, 2), ((12, 13), 4, 3), ((3, 3), 3, 1)]
)
def test_the_convolution_equals_the_reference_forward_and_backward(size, kernel, stride):
    x, layer = normal(2, *size, 3), _convolution(normal(5, 3, kernel, kernel), stride)
    layer = jax.tree.map(lambda leaf: leaf + np.float32(0.1), layer)

    def both(layer, x):
        loss = lambda f: jax.value_and_grad(lambda layer, x: jnp.sum(jnp.sin(f(layer, x))), (0, 1))(layer, x)
        return loss(_convolve), loss(reference), (_convolve(layer, x), reference(layer, x))

    ours, theirs, forwards = jax.jit(both)(layer, x)
    np.testing.assert_allclose(*forwards, rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), ours, theirs)


def test_large_images_pass_through_three_layers():
    space = Box(0, 255, (64, 64, 4), np.uint8)
    net = make(space, 6, 0.01, (8,), "relu")
    # Only their shapes are initialised: orthogonal weights of this size take a while.
    shapes = jax.eval_shape(net.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(0.05 * rng.normal(size=x.shape), x.dtype), shapes)
    assert [layer.weight.shape[0] for layer in params.convolutions] == [32, 64, 64]
    obs = jnp.asarray(rng.integers(0, 256, (2, 64, 64, 4)), jnp.uint8)

    def both(params, obs):
        x = obs / jnp.float32(255)
        for layer in params.convolutions:
            x = jax.nn.relu(reference(layer, x))
        return net.apply(params, obs), forward(params.head, x.reshape(2, -1), "relu")

    np.testing.assert_allclose(*jax.jit(both)(params, obs), rtol=1e-3, atol=1e-4)


def test_an_image_and_a_vector_both_reach_the_outputs():
    space = {"cue": Discrete(3), "image": Box(0.0, 1.0, (6, 6, 2))}
    net = make(space, 2, 1.0, (8,), "tanh")
    params = jax.jit(net.init)(jax.random.key(0))
    assert isinstance(params, ConvNet)
    assert params.head[0].weight.shape == (8, 4 * 4 * 16 + 3)
    base = {"cue": jnp.asarray([0]), "image": jnp.zeros((1, 6, 6, 2))}
    apply = jax.jit(net.apply)
    out = apply(params, base)
    assert not np.allclose(out, apply(params, base | {"cue": jnp.asarray([1])}))
    assert not np.allclose(out, apply(params, base | {"image": jnp.ones((1, 6, 6, 2))}))


def test_normalised_convolutions_do_not_see_the_scale_of_the_image():
    net = make(Box(0.0, 1.0, (6, 6, 2)), 2, 1.0, (8,), "relu", layer_norm=True)
    params = jax.jit(net.init)(jax.random.key(0))
    assert params.convolutions[0].gain.shape == (16,)
    image = jnp.abs(normal(3, 6, 6, 2))
    apply = jax.jit(net.apply)
    np.testing.assert_allclose(apply(params, image), apply(params, 10 * image), rtol=0.05, atol=1e-2)
    assert not np.allclose(apply(params, image), apply(params, image[::-1]), atol=1e-2)
