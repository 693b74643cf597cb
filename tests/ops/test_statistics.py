"""Running moments against NumPy over all that was seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.ops.statistics import no_moments, normalize, observe, variance
from shoal.types import Axis

compiled = jax.jit(observe, static_argnums=2)


def samples(seed, *shape):
    rng = np.random.default_rng(seed)
    return rng.normal(3.0, 2.0, size=shape).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 7]), min_size=1, max_size=6), st.floats(-100, 100))
def test_merging_parts_equals_numpy_over_all_data(parts, offset):
    data = [samples(i, n, 3) + np.float32(offset) for i, n in enumerate(parts)]
    moments = no_moments(jnp.zeros(3))
    for part in data:
        moments = compiled(moments, part)
    whole = np.concatenate(data).astype(np.float64)
    assert moments.count == len(whole)
    np.testing.assert_allclose(moments.mean[0], whole.mean(0), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(variance(moments)[0], whole.var(0), rtol=1e-3, atol=1e-3)


def test_variance_survives_a_large_mean():
    """Sums of squares would lose every digit here."""
    moments = no_moments(jnp.zeros(()))
    data = samples(0, 50, 100)
    for part in data:
        moments = compiled(moments, part + np.float32(1e4))
    np.testing.assert_allclose(variance(moments)[0], data.astype(np.float64).var(), rtol=1e-2)


def test_two_leading_axes_count_as_samples():
    data = samples(0, 5, 4, 3)
    whole, flat = (compiled(no_moments(jnp.zeros(3)), x, n) for x, n in ((data, 2), (data.reshape(20, 3), 1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, flat)


def test_shares_of_the_data_axis_see_the_whole():
    data = samples(0, 8, 6, 2)
    whole = compiled(no_moments(jnp.zeros(2)), data[:4].reshape(-1, 2))
    whole = compiled(whole, data[4:].reshape(-1, 2))

    def share(parts):
        axis = Axis(lambda tree: jax.lax.psum(tree, "data"), jax.lax.axis_index("data"), 2)
        moments = no_moments(jnp.zeros(2))
        for part in parts:
            moments = observe(moments, part, 2, axis)
        return moments

    shares = data.reshape(2, 4, 2, 3, 2)  # [chunk, step, share, env, leaf]
    both = jax.jit(jax.vmap(share, axis_name="data", in_axes=2))(jnp.asarray(shares))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, [b, b], rtol=1e-5), both, whole)


def test_before_the_first_sample_values_pass_through():
    x = jnp.asarray([-3.0, 0.0, 7.5])
    np.testing.assert_allclose(normalize(no_moments(x), x), x, rtol=1e-6)


def test_normalised_values_have_mean_0_deviation_1_and_are_clipped():
    data = jnp.asarray(samples(0, 1000, 3))
    moments = observe(no_moments(data[0]), data)
    seen = np.asarray(normalize(moments, data))
    np.testing.assert_allclose(seen.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(seen.std(0), 1, atol=1e-4)
    assert normalize(moments, jnp.full((1, 3), 1e6)).tolist() == [[10.0] * 3]


def test_a_constant_observation_stays_finite():
    constant = jnp.full((10, 2), 5.0)
    moments = observe(no_moments(constant[0]), constant)
    np.testing.assert_array_equal(normalize(moments, constant), 0)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_])
def test_integers_are_left_alone(dtype):
    tree = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 3), dtype), "c": 2 * jnp.ones((4,))}
    moments = observe(no_moments(jax.tree.map(lambda x: x[0], tree)), tree)
    assert [m.shape for m in moments.mean] == [(2,), ()]
    seen = normalize(moments, tree)
    assert seen["b"] is tree["b"]
    np.testing.assert_array_equal(seen["c"], 0)


def test_a_tree_without_floats_has_no_moments():
    tree = jnp.ones((4, 2), jnp.uint8)
    moments = no_moments(tree[0])
    assert observe(moments, tree) == moments
    assert normalize(moments, tree) is tree
