"""Densities, entropies and draws against SciPy; what a mask forbids never happens."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from shoal.ops import distributions
from shoal.types import Box, Discrete, MultiDiscrete

DRAWS = 20_000
MULTI = MultiDiscrete((2, 3, 4))
DICT = {"arm": Box(-2.0, 4.0, (2,)), "grip": Discrete(3), "legs": MULTI}


def distribution(space):
    """Compiled function by function: operation by operation would take minutes."""
    dist = distributions.distribution(space)
    jitted = {name: jax.jit(getattr(dist, name)) for name in ("sample", "log_prob", "entropy", "action")}
    return dist._replace(noise=jax.jit(dist.noise, static_argnums=1), **jitted)


def outputs(size, rows=1, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, size)), jnp.float32)


def draw(dist, out, free=None, mask=None, number=DRAWS):
    """`number` samples for one row of outputs."""
    free = dist.free if free is None else free
    noise = dist.noise(jax.random.key(0), number)
    return dist.sample(jnp.broadcast_to(out[0], (number, dist.size)), free, mask, noise)


def rare(counts, p):
    """Chi-square: is a draw this odd expected less than once in 10,000?"""
    counts, p = counts[p > 0], np.asarray(p, np.float64)[p > 0]
    return stats.chisquare(counts, p / p.sum() * counts.sum()).pvalue < 1e-4


def test_categorical_equals_scipy():
    dist, out = distribution(Discrete(5)), outputs(5, 7)
    p = special.softmax(np.asarray(out, np.float64), -1)
    for action in range(5):
        log_prob = dist.log_prob(out, dist.free, None, jnp.full((7,), action))
        np.testing.assert_allclose(log_prob, np.log(p[:, action]), rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(out, dist.free, None), stats.entropy(p, axis=-1), rtol=1e-5)


def test_categorical_draws_follow_the_probabilities():
    dist, out = distribution(Discrete(5)), outputs(5)
    picks = draw(dist, out)
    assert picks.dtype == jnp.int32
    assert not rare(np.bincount(picks, minlength=5), special.softmax(np.asarray(out[0], np.float64)))


def test_multi_discrete_is_a_product_of_categoricals():
    dist, out = distribution(MULTI), outputs(9, 3)
    parts = [
        np.log(special.softmax(np.asarray(x, np.float64), -1)) for x in np.split(np.asarray(out), [2, 5], -1)
    ]
    picks = np.array([[0, 2, 1], [1, 0, 3], [1, 1, 0]])
    want = sum(part[np.arange(3), pick] for part, pick in zip(parts, picks.T))
    np.testing.assert_allclose(dist.log_prob(out, (), None, jnp.asarray(picks)), want, rtol=1e-5)
    entropy = sum(stats.entropy(np.exp(part), axis=-1) for part in parts)
    np.testing.assert_allclose(dist.entropy(out, (), None), entropy, rtol=1e-5)
    drawn = np.asarray(draw(dist, out))
    assert drawn.shape == (DRAWS, 3)
    for i, part in enumerate(parts):
        assert not rare(np.bincount(drawn[:, i], minlength=MULTI.nvec[i]), np.exp(part[0]))


def test_entries_of_a_multi_discrete_draw_are_independent():
    dist = distribution(MultiDiscrete((2, 2)))
    picks = np.asarray(draw(dist, jnp.zeros((1, 4))))
    table = np.histogram2d(picks[:, 0], picks[:, 1], bins=2)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_gaussian_equals_scipy():
    dist, mean = distribution(Box(-1.0, 1.0, (3,))), outputs(3, 6)
    free, sample = jnp.asarray([0.3, -1.0, 0.0]), outputs(3, 6, seed=1)
    normal = stats.norm(np.asarray(mean, np.float64), np.exp(np.asarray(free, np.float64)))
    np.testing.assert_allclose(
        dist.log_prob(mean, free, None, sample), normal.logpdf(sample).sum(-1), rtol=1e-5
    )
    np.testing.assert_allclose(dist.entropy(mean, free, None), normal.entropy().sum(-1), rtol=1e-5)
    drawn = np.asarray(draw(dist, mean, free))
    for i in range(3):
        assert stats.kstest(drawn[:, i], stats.norm(mean[0, i], np.exp(free[i])).cdf).pvalue > 1e-4


@pytest.mark.parametrize(
    ("space", "sample", "action"),
    [
        (Box(-2.0, 4.0, (2,)), [0.5, -3.0], [2.5, -2.0]),  # in half ranges around the middle, clipped
        (Box(-math.inf, math.inf, (2,)), [0.5, -30.0], [0.5, -30.0]),
        (Box(0.0, math.inf, (2,)), [0.5, -3.0], [0.5, 0.0]),
        (Box((-1.0, -math.inf), (3.0, 2.0), (2,)), [0.5, 5.0], [2.0, 2.0]),  # each entry by its own bounds
        (Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (2,)), [0.5, -30.0], [0.5, -30.0]),
    ],
)
def test_a_box_action_is_its_sample_in_units_of_the_range_and_within_bounds(space, sample, action):
    dist = distribution(space)
    got = dist.action(jnp.asarray([sample]))
    assert got.dtype == space.dtype
    np.testing.assert_allclose(got, [action], rtol=1e-6)


def test_a_box_action_has_the_spaces_shape_and_type():
    space = Box(-1.0, 1.0, (2, 3), np.float16)
    dist = distribution(space)
    action = dist.action(draw(dist, jnp.zeros((1, 6)), number=50))
    assert action.shape == (50, 2, 3)
    assert action.dtype == np.float16
    assert np.abs(action).max() <= 1
    scalar = distribution(Box(0.0, 1.0))
    assert scalar.action(draw(scalar, jnp.zeros((1, 1)), number=50)).shape == (50,)


def test_a_dict_is_the_product_of_its_parts():
    dist = distribution(DICT)
    assert dist.size == 2 + 3 + 9
    out = outputs(dist.size, 4)
    parts = [distribution(DICT[name]) for name in sorted(DICT)]
    pieces = np.split(np.asarray(out), [2, 5], -1)
    noise = dist.noise(jax.random.key(0), 4)
    sample = dist.sample(out, dist.free, None, noise)
    assert sorted(sample) == sorted(DICT)
    log_prob = sum(
        p.log_prob(x, p.free, None, sample[name]) for p, x, name in zip(parts, pieces, sorted(DICT))
    )
    np.testing.assert_allclose(dist.log_prob(out, dist.free, None, sample), log_prob, rtol=1e-5)
    entropy = sum(p.entropy(x, p.free, None) for p, x in zip(parts, pieces))
    np.testing.assert_allclose(dist.entropy(out, dist.free, None), entropy, rtol=1e-5)
    action = dist.action(sample)
    np.testing.assert_allclose(action["arm"], np.clip(1 + 3 * np.asarray(sample["arm"]), -2, 4), rtol=1e-6)
    np.testing.assert_array_equal(action["legs"], sample["legs"])


def test_parts_of_a_dict_do_not_share_noise():
    arm, leg = distribution({"a": Box(-1.0, 1.0, (2,)), "b": Box(-1.0, 1.0, (2,))}).noise(
        jax.random.key(0), 5
    )
    assert not np.any(np.isclose(arm, leg))


def test_without_noise_the_sample_is_the_mode():
    dist = distribution(DICT)
    out = outputs(dist.size, 5)
    mode = dist.sample(out, dist.free, None, None)
    np.testing.assert_array_equal(mode["arm"], out[:, :2])
    np.testing.assert_array_equal(mode["grip"], np.argmax(out[:, 2:5], -1))
    best = dist.log_prob(out, dist.free, None, mode)
    for seed in range(20):
        other = dist.sample(out, dist.free, None, dist.noise(jax.random.key(seed), 5))
        assert np.all(np.asarray(dist.log_prob(out, dist.free, None, other)) <= np.asarray(best))


MASKED = [
    (Discrete(4), np.asarray([False, True, True, False])),
    (MULTI, np.asarray([True, False, False, True, True, True, False, False, True])),
]


@pytest.mark.parametrize(("space", "mask"), MASKED, ids=["discrete", "multi"])
def test_what_the_mask_forbids_is_never_drawn_even_where_the_network_insists(space, mask):
    dist = distribution(space)
    out = jnp.asarray(np.where(mask, outputs(dist.size), 50.0), jnp.float32)
    picks = np.asarray(draw(dist, out, mask=mask)).reshape(DRAWS, -1)
    greedy = np.asarray(dist.sample(out, (), mask, None)).reshape(1, -1)
    sizes = space.nvec if isinstance(space, MultiDiscrete) else (space.n,)
    pieces = zip(
        np.split(np.asarray(mask), np.cumsum(sizes)[:-1]), np.split(np.asarray(out[0]), np.cumsum(sizes)[:-1])
    )
    for i, (allowed, logits) in enumerate(pieces):
        assert allowed[picks[:, i]].all()
        assert allowed[greedy[:, i]].all()
        p = np.where(allowed, np.exp(np.asarray(logits, np.float64)), 0)
        assert allowed.sum() == 1 or not rare(np.bincount(picks[:, i], minlength=len(p)), p / p.sum())


@pytest.mark.parametrize(("space", "mask"), MASKED, ids=["discrete", "multi"])
def test_masks_leave_entropy_and_gradients_finite_and_forbidden_logits_alone(space, mask):
    dist = distribution(space)
    out = outputs(dist.size)
    sample = dist.sample(out, (), mask, None)
    loss = lambda out: jnp.sum(dist.log_prob(out, (), mask, sample) + dist.entropy(out, (), mask))
    value, slope = jax.jit(jax.value_and_grad(loss))(out)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
    np.testing.assert_array_equal(np.asarray(slope)[0][~np.asarray(mask)], 0)
    assert np.any(np.asarray(slope)[0][np.asarray(mask)] != 0)
    sizes = space.nvec if isinstance(space, MultiDiscrete) else (space.n,)
    most = sum(np.log(part.sum()) for part in np.split(np.asarray(mask), np.cumsum(sizes)[:-1]))
    flat = dist.entropy(jnp.zeros((1, dist.size)), (), mask)
    np.testing.assert_allclose(flat, most, rtol=1e-5, atol=1e-6)


def test_a_mask_for_a_dict_may_leave_parts_out():
    dist = distribution(DICT)
    mask = {"arm": None, "grip": jnp.asarray([False, True, False]), "legs": None}
    picks = draw(dist, outputs(dist.size), mask=mask, number=100)
    np.testing.assert_array_equal(picks["grip"], 1)
    assert len(np.unique(picks["legs"])) > 1


def test_extreme_logits_stay_finite():
    dist = distribution(Discrete(3))
    out = jnp.asarray([[1e4, -1e4, 0.0]])
    both = lambda out: jnp.sum(dist.log_prob(out, (), None, jnp.asarray([1])) + dist.entropy(out, (), None))
    value, slope = jax.jit(jax.value_and_grad(both))(out)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
