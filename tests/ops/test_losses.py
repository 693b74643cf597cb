"""Loss terms at the points where their branches meet."""

import jax
import numpy as np
import pytest

from shoal.ops.losses import clipped_squared_error, clipped_surrogate, squared_error

gradient = jax.grad(clipped_surrogate)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # at the old policy: the plain policy gradient
        (1.5, 2.0, -2.4, 0.0),  # gained enough: no further push
        (0.5, 2.0, -1.0, -2.0),  # moved the wrong way: pushed back at full strength
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 2.0),
    ],
)
def test_the_surrogate_stops_only_moves_that_gain(ratio, advantage, loss, slope):
    np.testing.assert_allclose(clipped_surrogate(ratio, advantage, 0.2), loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(ratio, advantage, 0.2), slope, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "want"),
    [(1.1, 0.5 * 0.9**2), (1.9, 0.5 * 0.8**2), (0.5, 0.5 * 1.5**2), (5.0, 0.5 * 3.0**2)],
)
def test_the_clipped_value_loss_is_the_worse_of_two(value, want):
    """Old value 1, target 2, clip 0.2."""
    np.testing.assert_allclose(clipped_squared_error(value, 1.0, 2.0, 0.2), want, rtol=1e-6)


def test_the_squared_error_has_the_half():
    assert squared_error(3.0, 1.0) == 2.0
