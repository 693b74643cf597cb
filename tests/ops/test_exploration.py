"""Epsilon-greedy acting: how often it explores, where to, and never where it may not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from shoal.ops.exploration import allowed, annealed, epsilon_greedy, exploration_noise, taken

DRAWS = 20_000
NOISE = exploration_noise(jax.random.key(0), DRAWS)


def act(q, mask, epsilon, noise=NOISE):
    """The action of each draw, all on the same values."""
    rows = lambda x: None if x is None else jnp.broadcast_to(jnp.asarray(x), (DRAWS, len(x)))
    return np.asarray(epsilon_greedy(rows(q), rows(mask), jnp.float32(epsilon), noise))


@pytest.mark.parametrize("mask", [None, [True, False, True, True, False]])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_random_actions_are_uniform_over_the_allowed_ones_and_the_rest_is_greedy(mask, epsilon):
    """Chi-square at alpha 1e-3 under a fixed key."""
    counts = np.bincount(act([0.0, 9.0, 1.0, 0.5, 8.0], mask, epsilon), minlength=5)
    free = np.ones(5) if mask is None else np.asarray(mask, float)
    chance = epsilon * free / free.sum()
    chance[1 if mask is None else 2] += 1 - epsilon
    assert np.all(counts[chance == 0] == 0)
    assert epsilon == 0 or stats.chisquare(counts[chance > 0], DRAWS * chance[chance > 0]).pvalue > 1e-3


def test_without_noise_the_best_allowed_action_is_taken():
    q = jnp.asarray([[3.0, 2.0, 1.0], [-9.0, -8.0, -7.0]])
    mask = jnp.asarray([[False, True, True], [True, True, False]])
    assert epsilon_greedy(q, mask, jnp.float32(1), None).tolist() == [1, 1]
    assert epsilon_greedy(q, None, jnp.float32(1), None).tolist() == [0, 2]
    assert jnp.max(allowed(q, mask), -1).tolist() == [2, -8]


def test_taken_reads_one_value_per_row():
    q = jnp.arange(12.0).reshape(2, 2, 3)
    assert taken(q, jnp.asarray([[0, 1], [2, 0]])).tolist() == [[0, 4], [8, 9]]


@pytest.mark.parametrize(("progress", "want"), [(0.0, 1.0), (0.2, 0.6), (0.4, 0.2), (0.9, 0.2)])
def test_exploration_falls_linearly_over_its_share_of_the_budget(progress, want):
    np.testing.assert_allclose(annealed(1.0, 0.2, 0.4, jnp.float32(progress)), want, rtol=1e-6)


def test_exploration_over_no_share_of_the_budget_ends_after_the_first_update():
    assert annealed(1.0, 0.2, 0.0, jnp.float32(0.01)) == pytest.approx(0.2)
