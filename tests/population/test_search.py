"""Axes: drawn from a prior by seed and agent alone, moved near, never outside, and 0 moves as well."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from shoal.population import search
from shoal.population.search import Axis, at, drawn, moved, value_of, with_value

LOG = Axis("ppo.lr", 1e-5, 1e-1, log=True)
LINEAR = Axis("ppo.clip", 0.0, 0.4)
WHOLE = Axis("env.length", 2, 9, whole=True)
LIST = Axis("ppo.gamma", 0.9, 0.999, choices=(0.9, 0.99, 0.999))
DEALT = LIST._replace(stride=2)
EVERY = [LOG, LINEAR, WHOLE, LIST]


def first(axis, agents, seed=0):
    ids = jnp.asarray(agents, jnp.int32)
    return np.asarray(jax.vmap(partial(drawn, axis))(jnp.full(ids.shape, seed, jnp.uint32), ids))


def near(axis, value, number=2000):
    keys = jax.random.split(jax.random.key(1), number)
    return np.asarray(jax.vmap(lambda key: moved(axis, jnp.float32(value), key))(keys))


@pytest.mark.parametrize("axis", EVERY, ids=lambda axis: axis.name)
def test_a_value_follows_from_seed_agent_and_axis_and_from_nothing_else(axis):
    among = first(axis, range(64))
    np.testing.assert_array_equal(first(axis, [7, 3]), among[[7, 3]])
    assert not np.array_equal(first(axis, range(64), seed=1), among)
    assert not np.array_equal(first(axis._replace(name="ppo.other"), range(64)), among)


def test_a_logarithmic_range_is_even_in_the_logarithm():
    values = np.log10(first(LOG, range(2000)))
    assert values.min() > -5
    assert values.max() < -1
    # Kolmogorov-Smirnov against the uniform distribution: 1.95 / sqrt(n) is passed with chance 0.001
    gap = np.abs(np.sort((values + 5) / 4) - np.arange(2000) / 2000).max()
    assert gap < 1.95 / np.sqrt(2000)


def test_the_ends_and_the_middle_of_each_kind():
    share = jnp.asarray([0.0, 0.5, 1.0])
    np.testing.assert_allclose(at(LOG, share), [1e-5, 1e-3, 1e-1], rtol=1e-4)
    np.testing.assert_allclose(at(LINEAR, share), [0.0, 0.2, 0.4], atol=1e-6)
    np.testing.assert_allclose(at(LIST, share), LIST.choices, rtol=1e-6)
    assert set(np.asarray(at(WHOLE, jnp.linspace(0, 1, 100))).tolist()) == set(range(2, 10))


def test_lists_that_are_dealt_out_make_a_grid():
    other = Axis("ppo.ent_coef", 0.0, 0.01, choices=(0.0, 0.01), stride=1)
    grid = list(zip(first(other, range(6)).tolist(), first(DEALT, range(6)).tolist()))
    assert len(set(grid)) == 6
    assert grid[0] == (0.0, np.float32(0.9))
    np.testing.assert_array_equal(first(DEALT, range(6, 12)), first(DEALT, range(6)))


@pytest.mark.parametrize("axis", EVERY, ids=lambda axis: axis.name)
def test_a_moved_knob_stays_in_its_range_and_does_move(axis):
    for value in (axis.low, at(axis, jnp.float32(0.5)), axis.high):
        values = near(axis, value)
        assert values.min() >= np.float32(axis.low)
        assert values.max() <= np.float32(axis.high)
        assert np.mean(values != np.float32(value)) > 0.5
        if axis.choices:
            assert set(values.tolist()) <= {float(np.float32(x)) for x in axis.choices}
        if axis.whole:
            np.testing.assert_array_equal(values, np.round(values))


def test_a_moved_knob_is_mostly_near_and_now_and_then_anywhere():
    values = near(LOG, 1e-3)
    close = np.isclose(values, 1e-3 * search.FACTOR) | np.isclose(values, 1e-3 / search.FACTOR)
    # Binomial with chance 1 - RESAMPLE: four standard deviations are 0.039
    assert abs(close.mean() - (1 - search.RESAMPLE)) < 0.039
    assert values.min() < 1e-4
    assert values.max() > 1e-2


def test_a_knob_at_0_can_move():
    assert np.any(near(LINEAR, 0.0) > 0)
    assert np.any(near(LOG, 0.0) >= np.float32(1e-5))


def test_a_value_in_force_is_read_and_written_without_changing_its_dtype():
    state = probes.start(probes.knobs())
    changed = with_value(LOG, state, jnp.arange(4) * 0.1)
    np.testing.assert_allclose(value_of(LOG, changed), [0.0, 0.1, 0.2, 0.3], rtol=1e-6)
    end = Axis("env.p_end", 0.0, 1.0)
    changed = with_value(end, changed, jnp.ones(4))
    assert value_of(end, changed).tolist() == [1.0] * 4
    assert jax.tree.map(lambda x: (x.shape, x.dtype), changed) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


@pytest.mark.parametrize("axis", [Axis("ppo.lr", 1e-30, 1e10, log=True), Axis("ppo.lr", -3e38, 3e38)])
def test_values_of_the_widest_ranges_differ(axis):
    values = jax.vmap(partial(at, axis))(jnp.linspace(0.0, 1.0, 5))
    assert np.all(np.diff(values) > 0)
    assert np.all(np.isfinite(values))
    np.testing.assert_allclose(values[jnp.array([0, -1])], [axis.low, axis.high], rtol=1e-5)
