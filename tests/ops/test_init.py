"""First weights: orthogonal ones without LAPACK, and LeCun's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.ops.init import lecun_normals, orthogonal, orthogonals

SHAPES = [(64, 4), (2, 64), (32, 32), (1, 8), (8, 1), (1, 1), (16, 4, 3, 3), (8, 2, 2, 2)]


@pytest.fixture(scope="module")
def matrices():
    """One program over 16 lanes: where a batched QR would wait for itself for ever."""
    scales = [1.0 + i for i in range(len(SHAPES))]
    keys = jax.random.split(jax.random.key(0), 16)
    return scales, jax.jit(jax.vmap(lambda key: orthogonals(key, SHAPES, scales)))(keys)


@pytest.mark.parametrize("i", range(len(SHAPES)), ids=map(str, SHAPES))
def test_the_shorter_side_is_orthonormal_times_scale(matrices, i):
    scales, stacked = matrices
    assert stacked[i].shape == (16, *SHAPES[i])
    assert stacked[i].dtype == jnp.float32
    flat = np.asarray(stacked[i], np.float64).reshape(16, SHAPES[i][0], -1) / scales[i]
    for x in flat:
        square = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        np.testing.assert_allclose(square, np.eye(len(square)), atol=1e-4)


def test_lanes_and_layers_do_not_share_weights(matrices):
    _, stacked = matrices
    flat = np.stack([np.asarray(x).reshape(16, -1)[:, :4] for x in stacked if x[0].size >= 4])
    rows = flat.reshape(-1, 4)
    assert len(np.unique(rows.round(5), axis=0)) == len(rows)


def test_a_wide_layer_converges():
    """The smallest singular value of a large square Gaussian matrix is tiny; the iterations must suffice."""
    for seed in range(3):
        x = np.asarray(orthogonal(jax.random.key(seed), (256, 256), 2.0), np.float64) / 2
        np.testing.assert_allclose(x @ x.T, np.eye(256), atol=1e-4)


def test_signs_are_symmetric():
    """Haar measure has no preferred sign: mean of one entry over 2,000 keys within 5 standard errors."""
    x = jax.jit(jax.vmap(lambda key: orthogonal(key, (4, 4))))(jax.random.split(jax.random.key(0), 2000))
    assert np.all(np.abs(np.mean(x, 0)) < 5 * 0.5 / np.sqrt(2000))
    np.testing.assert_allclose(np.mean(np.square(x), 0), 0.25, atol=0.03)


def test_lecun_weights_have_variance_scale_squared_over_inputs_and_no_tails():
    shapes, scales = [(300, 40), (64, 4, 5, 5)], [1.0, 3.0]
    for x, shape, scale in zip(lecun_normals(jax.random.key(0), shapes, scales), shapes, scales):
        assert (x.shape, x.dtype) == (shape, jnp.float32)
        unit = np.asarray(x, np.float64) * np.sqrt(np.prod(shape[1:])) / scale
        np.testing.assert_allclose(np.var(unit), 1.0, rtol=0.06)
        assert np.max(np.abs(unit)) < 2.0 / 0.8796
        assert abs(np.mean(unit)) < 0.06


def test_lecun_weights_are_the_default_of_flax():
    nn = pytest.importorskip("flax.linen")
    theirs = nn.initializers.lecun_normal()(jax.random.key(1), (40, 300), jnp.float32)
    (ours,) = lecun_normals(jax.random.key(0), [(300, 40)], [1.0])
    np.testing.assert_allclose(
        np.quantile(ours, [0.05, 0.5, 0.95]), np.quantile(theirs, [0.05, 0.5, 0.95]), atol=0.015
    )
