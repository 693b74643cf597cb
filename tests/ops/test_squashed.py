"""The squashed Gaussian against a change of variables in float64, and where float32 rounds to ±1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from shoal.envs import spaces
from shoal.errors import ShoalError
from shoal.ops.squashed import LOG_STD, bounded, squashed, uniform
from shoal.types import Box, Discrete, MultiDiscrete

ARM = Box([-2.0, 0.0], [4.0, 10.0], (2,))
TREE = {"arm": ARM, "legs": (Box(-1.0, 1.0, ()), Box(0.0, 1.0, (2, 3)))}
draw = jax.jit(squashed)


def deviation(spread):
    low, high = LOG_STD
    return np.exp(low + (high - low) * (1 + np.tanh(np.float64(spread))) / 2)


def test_the_density_is_that_of_the_change_of_variables():
    rng = np.random.default_rng(0)
    outputs, noise = rng.normal(size=(64, 6)).astype(np.float32), rng.normal(size=(64, 3)).astype(np.float32)
    action, log_prob = draw(outputs, noise)
    mean, std = np.float64(outputs[:, :3]), deviation(outputs[:, 3:])
    raw = mean + std * noise
    np.testing.assert_allclose(action, np.tanh(raw), rtol=1e-5, atol=1e-6)
    want = stats.norm.logpdf(raw, mean, std) - np.log(1 - np.tanh(raw) ** 2)
    np.testing.assert_allclose(log_prob, want.sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outputs", [(0.0, 0.0), (0.5, 0.3), (-1.0, 0.5)])
def test_the_density_adds_up_to_1(outputs):
    """Over actions: what the draw at each action says of it."""
    mean, std = outputs[0], deviation(outputs[1])
    action = np.tanh(np.linspace(mean - 6 * std, mean + 6 * std, 20_001))
    noise = ((np.arctanh(action) - mean) / std).astype(np.float32)
    drawn, log_prob = draw(np.broadcast_to(np.float32(outputs), (len(noise), 2)), noise[:, None])
    assert abs(integrate.trapezoid(np.exp(log_prob), drawn[:, 0]) - 1) < 1e-3


@pytest.mark.parametrize("mean", [-1e4, -30.0, 30.0, 1e4])
@pytest.mark.parametrize("spread", [-1e4, 0.0, 1e4])
def test_at_a_bound_density_and_gradient_are_finite(mean, spread):
    """tanh is ±1 there, and log(1 - tanh²) would be -inf."""

    def log_prob(outputs):
        action, log_prob = squashed(outputs, jnp.ones((1,)))
        return log_prob, action

    (value, action), slope = jax.value_and_grad(log_prob, has_aux=True)(jnp.asarray([mean, spread]))
    assert abs(action[0]) == 1
    assert np.isfinite(value)
    assert np.all(np.isfinite(slope))
    assert slope[0] * mean > 0  # a raw mean farther out is a taller density: twice its distance
    np.testing.assert_allclose(abs(slope[0]), 2.0, rtol=1e-3)


def test_without_noise_it_is_the_squashed_mean():
    outputs = np.asarray([[0.3, -2.0, 5.0, 5.0]], np.float32)
    action, log_prob = draw(outputs, None)
    np.testing.assert_allclose(action, np.tanh([[0.3, -2.0]]), rtol=1e-5)
    np.testing.assert_allclose(log_prob, draw(outputs, np.zeros((1, 2), np.float32))[1], rtol=1e-6)


def test_deviations_stay_within_their_bounds():
    for spread, want in zip((-1e9, 1e9), LOG_STD):
        _, log_prob = draw(np.asarray([0.0, spread], np.float32), np.zeros(1, np.float32))
        np.testing.assert_allclose(log_prob, stats.norm.logpdf(0, 0, np.exp(want)), rtol=1e-5)


def test_uniform_is_uniform():
    noise = jax.random.normal(jax.random.key(0), (20_000,))
    assert stats.kstest(np.asarray(uniform(noise)), stats.uniform(-1, 2).cdf).pvalue > 1e-4


# --- Bounds -----------------------------------------------------------------------------------


def test_vectors_are_scaled_to_the_bounds_of_each_entry():
    space = bounded(ARM, "sac")
    assert space.size == 2
    vectors = np.asarray([[-1, -1], [1, 1], [0, 0.5]], np.float32)
    np.testing.assert_allclose(space.action(vectors), [[-2, 0], [4, 10], [1, 7.5]])


def test_a_tree_of_boxes_is_one_vector():
    space = bounded(TREE, "sac")
    assert space.size == 2 + 1 + 6
    for vector in (np.zeros(9), np.ones(9), -np.ones(9), np.linspace(-1, 1, 9)):
        assert spaces.contains(TREE, space.action(jnp.asarray(vector, jnp.float32)))
    batch = space.action(jnp.zeros((5, 4, 9)))
    assert batch["legs"][1].shape == (5, 4, 2, 3)


def test_rounding_never_leaves_the_bounds():
    """The middle plus half the range may be one bit above the top."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=1000).astype(np.float32)
    high = low + rng.uniform(0.01, 3, 1000).astype(np.float32)
    space = Box(low, high, (1000,))
    for bound in (-1.0, 1.0):
        assert spaces.contains(space, bounded(space, "sac").action(jnp.full(1000, bound)))


@pytest.mark.parametrize(
    ("space", "what"),
    [
        (Discrete(3), "sac needs continuous actions, and here is Discrete"),
        ({"a": ARM, "b": MultiDiscrete((2, 3))}, "here is MultiDiscrete"),
        (Box(0, 5, (2,), np.int32), "here is a Box of int32"),
        (Box(-np.inf, np.inf, (2,)), "some have none: -inf … inf"),
        (Box([-1.0, 0.0], [1.0, 3.4e38], (2,)), "some have none"),
    ],
)
def test_other_spaces_are_refused(space, what):
    with pytest.raises(ShoalError, match=what) as error:
        bounded(space, "sac")
    assert "--algo ppo" in error.value.hint
