"""One optimiser step, told apart from its parts with plain gradient descent."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shoal.ops.descent import descend, warmed

PLAIN = optax.identity()


@pytest.mark.parametrize(
    ("norm", "limit", "length"), [(10.0, 2.0, 2.0), (1.0, 2.0, 1.0), (10.0, np.inf, 10.0)]
)
def test_a_step_is_as_long_as_rate_times_clipped_norm(norm, limit, length):
    gradient = {"a": jnp.float32([0.6 * norm]), "b": jnp.float32([[0.8 * norm]])}
    params = {"a": jnp.ones(1), "b": jnp.ones((1, 1))}
    after, _ = descend(PLAIN, PLAIN.init(params), params, gradient, jnp.float32(0.1), limit)
    np.testing.assert_allclose(after["a"], 1 - 0.1 * 0.6 * length, rtol=1e-5)
    np.testing.assert_allclose(after["b"], [[1 - 0.1 * 0.8 * length]], rtol=1e-5)


def test_no_gradient_is_no_step_and_no_nan():
    zero = jnp.zeros(3)
    after, _ = descend(PLAIN, PLAIN.init(zero), zero, zero, jnp.float32(0.1), jnp.float32(np.inf))
    assert after.tolist() == [0, 0, 0]


def test_a_warmed_step_size_rises_to_its_full_size_and_none_is_the_same_bits():
    lr = jnp.float32(3e-4)
    rising = [float(warmed(lr, 0.25, jnp.float32(progress))) for progress in (0.0, 0.125, 0.25, 0.9)]
    np.testing.assert_allclose(rising, [0.0, 1.5e-4, 3e-4, 3e-4], rtol=1e-6)
    assert all(warmed(lr, 0.0, jnp.float32(progress)) == lr for progress in (0.0, 0.5, 1.0))
