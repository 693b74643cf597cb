"""The multi-layer perceptron: two layouts, one function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.errors import ShoalError
from shoal.nets import ACTIVATIONS, house_net
from shoal.nets.mlp import MANY_ROWS, affine, forward, make
from shoal.types import Box, Net

SPACE = Box(-1.0, 1.0, (5,))


@pytest.fixture(scope="module")
def net():
    net = make(SPACE, 3, 0.01, (16, 8), "tanh")
    return Net(net.init, jax.jit(net.apply)), jax.jit(net.init)(jax.random.key(0))


def rows(number):
    return jnp.asarray(np.random.default_rng(0).normal(size=(number, 5)), jnp.float32)


def by_hand(params, x, act=np.tanh):
    x = np.asarray(x, np.float64)
    for layer in params[:-1]:
        x = act(x @ np.asarray(layer.weight, np.float64).T + layer.bias)
    return x @ np.asarray(params[-1].weight, np.float64).T + params[-1].bias


@pytest.mark.parametrize("number", [1, MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 1])
def test_both_layouts_give_what_numpy_gives(net, number):
    net, params = net
    params = jax.tree.map(lambda x: x + 0.1, params)  # biases that count
    got = net.apply(params, rows(number))
    assert got.shape == (number, 3)
    np.testing.assert_allclose(got, by_hand(params, rows(number)), rtol=1e-4, atol=1e-5)


def test_both_layouts_have_the_same_gradient(net):
    net, params = net
    loss = lambda params, x: jnp.sum(jnp.square(net.apply(params, x)))
    slope = jax.jit(jax.grad(loss))
    many = slope(params, rows(40))
    parts = [slope(params, x) for x in (rows(40)[:20], rows(40)[20:])]
    few = jax.tree.map(jnp.add, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), many, few)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_works_in_both_layouts(net, name):
    _, params = net
    compiled = jax.jit(forward, static_argnums=2)
    one, two = compiled(params, rows(40), name), compiled(params, rows(20), name)
    np.testing.assert_allclose(one[:20], two, rtol=1e-4, atol=1e-6)


def test_the_first_policy_is_nearly_uniform_and_biases_start_at_0(net):
    net, params = net
    assert [layer.weight.shape for layer in params] == [(16, 5), (8, 16), (3, 8)]
    assert all(np.all(layer.bias == 0) for layer in params)
    np.testing.assert_allclose(np.linalg.norm(params[-1].weight, 2), 0.01, rtol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(params[0].weight, 2), np.sqrt(2), rtol=1e-3)


def test_no_hidden_layer_is_a_linear_model():
    net = make(SPACE, 2, 1.0, (), "tanh")
    params = jax.jit(net.init)(jax.random.key(0))
    np.testing.assert_allclose(net.apply(params, rows(3)), by_hand(params, rows(3)), rtol=1e-4, atol=1e-6)


def test_lanes_of_a_population_have_their_own_weights():
    net = make(SPACE, 3, 1.0, (8,), "tanh")
    params = jax.jit(jax.vmap(net.init))(jax.random.split(jax.random.key(0), 3))
    assert not np.allclose(params[0].weight[0], params[0].weight[1])
    alone = jax.jit(net.init)(jax.random.split(jax.random.key(0), 3)[1])
    close = lambda stacked, one: np.testing.assert_allclose(stacked[1], one, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, params, alone)


def test_auto_takes_a_cnn_where_an_image_is_observed():
    image = Box(0, 255, (4, 4, 1), np.uint8)
    params = lambda kind, space: jax.eval_shape(
        house_net(kind, (4,), "relu")(space, 2, 1.0).init, jax.random.key(0)
    )
    assert hasattr(params("auto", image), "convolutions")
    assert not hasattr(params("auto", SPACE), "convolutions")
    assert params("mlp", image)[0].weight.shape == (4, 16)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_first_weights_are_drawn_as_asked(kind):
    image = Box(0, 255, (4, 4, 1), np.uint8)
    made = lambda init: house_net(kind, (32,), "relu", init=init)(image, 2, 1.0).init(jax.random.key(0))
    orthogonal, lecun = made("orthogonal"), made("lecun")
    assert jax.tree.structure(orthogonal) == jax.tree.structure(lecun)
    first = lambda params: (params if kind == "mlp" else params.convolutions)[0].weight
    wide = first(orthogonal).reshape(first(orthogonal).shape[0], -1)
    square = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    np.testing.assert_allclose(square, 2.0 * np.eye(len(square)), atol=1e-4)
    spread = float(jnp.std(first(lecun))) * np.sqrt(wide.shape[1])
    assert 0.8 < spread < 1.2


def test_an_unknown_network_is_named():
    with pytest.raises(ShoalError, match="no network is called 'transformer'"):
        house_net("transformer", (4,), "relu")


def test_a_plain_pair_is_a_net():
    pair = (lambda key: jnp.zeros((5, 2)), lambda params, obs: obs @ params)
    assert Net(*pair).apply(Net(*pair).init(jax.random.key(0)), rows(3)).shape == (3, 2)


@pytest.mark.parametrize("number", [MANY_ROWS - 1, MANY_ROWS])
def test_normalised_layers_give_what_numpy_gives(number):
    net = make(SPACE, 3, 1.0, (16, 8), "relu", layer_norm=True)
    shift = lambda x: x + 0.1 * jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) / x.size
    params = jax.tree.map(shift, jax.jit(net.init)(jax.random.key(0)))
    x = np.asarray(rows(number), np.float64)
    for layer in params[:-1]:
        x = x @ np.asarray(layer.linear.weight, np.float64).T + layer.linear.bias
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        x = np.maximum(x * layer.gain + layer.shift, 0)
    want = x @ np.asarray(params[-1].weight, np.float64).T + params[-1].bias
    np.testing.assert_allclose(jax.jit(net.apply)(params, rows(number)), want, rtol=1e-4, atol=1e-5)


def test_the_affine_map_has_the_gradient_that_autodiff_gives():
    rng = np.random.default_rng(0)
    weight, bias, x, slope = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 5), (3,), (5, 40), (3, 40))
    )

    def both(*given):
        ours, back = jax.vjp(affine, *given)
        theirs, backwards = jax.vjp(lambda weight, bias, x: weight @ x + bias[:, None], *given)
        return (ours, back(slope)), (theirs, backwards(slope))

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, *jax.jit(both)(weight, bias, x))
    lanes = jax.jit(jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.sin(affine(w, bias, x)))), (0, None)))
    one = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(affine(w, bias, x)))))
    close(lanes(jnp.stack([weight, 2 * weight]), x)[1], one(2 * weight, x))
