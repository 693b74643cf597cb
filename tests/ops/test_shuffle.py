"""The keyed bijection: a permutation for every n, and one that mixes."""

import jax
import numpy as np
import pytest
from scipy import stats

from shoal.ops.shuffle import _radices, permutation


@pytest.mark.parametrize("n", [1, 2, 3, 5, 97, 127, 128, 257, 509, 512, 1021, 4096, 65537])
def test_every_row_comes_exactly_once(n):
    for seed in range(3):
        order = np.asarray(jax.jit(permutation, static_argnums=1)(jax.random.key(seed), n))
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order), np.arange(n))


def test_every_row_comes_exactly_once_for_all_small_sizes(monkeypatch):
    """The same arithmetic in NumPy, which needs no compiling: all n from 1 to 300."""
    import shoal.ops.shuffle as shuffle

    bits = jax.random.bits

    def in_numpy(key, shape, dtype):
        return np.asarray(bits(key, shape, dtype))

    monkeypatch.setattr(shuffle.jax.random, "bits", in_numpy)
    monkeypatch.setattr(shuffle, "jnp", np)
    key = jax.random.key(3)
    with np.errstate(over="ignore"):
        for n in range(1, 301):
            order = permutation(key, n)
            assert order.dtype == np.int32
            np.testing.assert_array_equal(np.sort(order), np.arange(n))


def test_walking_back_into_range_takes_few_steps():
    """Each step is compiled; a size with a wide gap to its domain would compile for ever."""
    gaps = [a * b - n for n in (*range(1, 3000), 65521, 65537, 1_000_003) for a, b in [_radices(n)]]
    assert min(gaps) == 0
    assert max(gaps) <= 8


def test_different_keys_give_different_orders():
    orders = jax.vmap(lambda key: permutation(key, 64))(jax.random.split(jax.random.key(0), 200))
    assert len({tuple(row) for row in np.asarray(orders).tolist()}) == 200


@pytest.mark.parametrize("n", [12, 30, 64])
def test_each_row_lands_anywhere_equally_often(n):
    """Chi-square of position against row over 4,000 fixed keys, alpha 1e-4."""
    number = 4000
    keys = jax.random.split(jax.random.key(1), number)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: permutation(key, n)))(keys))
    counts = np.stack([np.bincount(orders[:, position], minlength=n) for position in range(n)])
    statistic = np.sum((counts - number / n) ** 2) / (number / n)
    assert statistic < stats.chi2.isf(1e-4, (n - 1) ** 2)


def test_neighbours_are_parted_like_chance():
    """How far apart rows i and i + 1 land, against a true permutation: two-sample KS test, alpha 1e-4."""
    keys = jax.random.split(jax.random.key(2), 300)
    ours = np.asarray(jax.jit(jax.vmap(lambda key: permutation(key, 128)))(keys))
    rng = np.random.default_rng(0)
    truth = np.stack([rng.permutation(128) for _ in range(300)])
    gap = lambda orders: np.abs(np.diff(orders[:, ::2].astype(int), axis=1)).ravel()
    assert stats.ks_2samp(gap(ours), gap(truth)).pvalue > 1e-4
