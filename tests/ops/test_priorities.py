"""Prioritised draws: how often, with which probability, on which share of the data axis."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.ops import priorities
from shoal.ops.shuffle import strata
from shoal.types import WHOLE, Axis


@partial(jax.jit, static_argnums=(1, 2))
def drawn(priority, minibatches, size, key=0):
    arguments = jax.random.key(key), len(priority), priority, minibatches, size, WHOLE
    return priorities.sample_prioritised(*arguments)


def shares(function, size, *leaves):
    """`function(axis, *leaves)` on every share of the data axis; leaves [B, …] are split over them."""
    total = lambda tree: jax.lax.psum(tree, "data")
    one = lambda *parts: function(Axis(total, jax.lax.axis_index("data"), size), *parts)
    split = [leaf.reshape(size, len(leaf) // size, *leaf.shape[1:]) for leaf in leaves]
    return jax.jit(jax.vmap(one, axis_name="data"))(*split)


def chances(priority, size):
    """Each slot's probability per draw: strata alike, within one in proportion."""
    groups = strata(len(priority), size)
    within = np.asarray(priority, np.float64).reshape(groups, -1)
    return (within / within.sum(1, keepdims=True) / groups).reshape(np.shape(priority))


@pytest.mark.parametrize(("envs", "slots", "size"), [(1, 20, 40), (4, 5, 40), (6, 3, 45), (2, 7, 64)])
def test_steps_are_drawn_in_proportion_to_their_priority(envs, slots, size):
    """Chi-squared of 40,000 draws: at most 41 of 20 slots 99.9 % of keys stay below 45.3 (20 degrees).

    Draws are stratified over the cumulative sum, which only makes it smaller.
    """
    rng = np.random.default_rng(envs)
    priority = jnp.asarray(
        rng.exponential(size=(envs, slots)) * (rng.random((envs, slots)) < 0.8), jnp.float32
    )
    index, chance = drawn(priority, 40_000 // size, size)
    want = chances(priority, size)
    np.testing.assert_allclose(chance, want[index.env, index.slot], rtol=1e-5)
    seen = np.zeros((envs, slots))
    np.add.at(seen, (np.ravel(index.env), np.ravel(index.slot)), 1)
    assert np.all(seen[np.asarray(priority) == 0] == 0)
    expected = want * index.env.size
    assert np.sum(np.square(seen - expected)[expected > 0] / expected[expected > 0]) < 45.3


def test_every_stratum_has_an_equal_share_of_every_minibatch():
    """Whatever its priorities sum up to."""
    index, _ = drawn(jnp.asarray([[1.0], [100.0], [1e-3], [1.0]]) * jnp.ones((4, 9)), 5, 12)
    for minibatch in np.asarray(index.env):
        assert np.bincount(minibatch).tolist() == [3] * 4


@pytest.mark.parametrize("place", [0, 1, 54, 102])
def test_the_only_step_with_a_priority_is_always_drawn(place):
    """Nothing is lost to padding, to rounding, or to slots that hold nothing yet."""
    priority = jnp.zeros((1, 103)).at[0, place].set(1e-7)
    index, chance = drawn(priority, 50, 64)
    assert np.all(index.slot == place)
    np.testing.assert_allclose(chance, 1, rtol=1e-6)


def test_priorities_far_apart_draw_no_empty_slot():
    rng = np.random.default_rng(0)
    priority = 10.0 ** rng.uniform(-6, 6, (1, 997)) * (rng.random((1, 997)) < 0.5)
    index, chance = drawn(jnp.asarray(priority, jnp.float32), 200, 128)
    assert np.all(priority[0, np.ravel(index.slot)] > 0)
    assert np.all(chance > 0)


@pytest.mark.parametrize("size", [2, 4])
def test_shares_of_the_data_axis_draw_the_same_rows_and_weigh_them_alike(size):
    priority = jnp.asarray(np.random.default_rng(0).exponential(size=(8, 13)), jnp.float32)

    def draw(axis, priority):
        index, chance = priorities.sample_prioritised(jax.random.key(1), 8, priority, 3, 16, axis)
        first = axis.index * len(priority)
        return index.env + first, index.slot, chance, priorities.weights(chance, 104, 0.5, axis)

    whole = draw(WHOLE, priority)
    parts = shares(draw, size, priority)  # [D, M, n here]
    rejoined = [np.moveaxis(np.asarray(x), 0, 1).reshape(3, 16) for x in parts]
    for want, got in zip(whole, rejoined):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_weights_undo_the_priorities_and_the_largest_of_a_minibatch_is_1():
    chance = np.array([[0.1, 0.2, 0.4], [0.5, 0.25, 0.25]], np.float32)
    for beta in (0.0, 0.4, 1.0):
        raw = (10 * chance) ** -beta
        got = priorities.weights(jnp.asarray(chance), 10, beta, WHOLE)
        np.testing.assert_allclose(got, raw / raw.max(1, keepdims=True), rtol=1e-5)


def test_a_weighted_mean_over_prioritised_draws_is_the_plain_mean():
    """With beta 1, whatever the priorities: importance sampling. To five deviations."""
    rng = np.random.default_rng(0)
    priority = jnp.asarray(rng.uniform(0.5, 2.0, (2, 50)), jnp.float32)
    value = rng.normal(size=(2, 50))
    index, chance = drawn(priority, 100, 200)
    weighted = value[index.env, index.slot] / (100 * np.asarray(chance))
    assert abs(weighted.mean() - value.mean()) < 5 * weighted.std() / np.sqrt(weighted.size)


@pytest.mark.parametrize(("written", "places"), [(0, [0, 1]), (3, [3, 4]), (4, [4, 0]), (9, [4, 0])])
def test_new_steps_enter_with_the_largest_priority_of_all(written, places):
    priority = jnp.asarray([[0.5, 0.1, 0.2, 0.0, 0.0], [0.1, 0.3, 0.1, 0.0, 0.0]])
    after = priorities.enter(priority, jnp.int32(written), 2, WHOLE)
    want = np.array(priority)
    want[:, places] = 0.5
    np.testing.assert_allclose(after, want)
    first = priorities.enter(jnp.zeros((2, 5)), jnp.int32(written), 2, WHOLE)
    assert np.all(np.asarray(first)[:, places] == 1)
    assert np.sum(first) == 4
    both = shares(lambda axis, part: priorities.enter(part, jnp.int32(written), 2, axis), 2, priority)
    np.testing.assert_allclose(both.reshape(2, 5), want)
