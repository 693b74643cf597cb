"""Against rliable, the reference implementation, and against loops that are plain to see."""

import numpy as np
import pytest
import rliable.metrics as reference
import scipy.stats

from shoal.errors import ShoalError
from shoal.runs import statistics


def draw(runs, tasks, seed=0):
    return np.random.default_rng(seed).normal(loc=np.arange(tasks), scale=2, size=(runs, tasks))


@pytest.mark.parametrize("shape", [(2, 1), (3, 5), (7, 1), (10, 4), (16, 3)])
def test_averages_equal_rliable(shape):
    scores = draw(*shape)
    assert statistics.iqm(scores) == pytest.approx(reference.aggregate_iqm(scores), rel=1e-12)
    assert statistics.mean(scores) == pytest.approx(reference.aggregate_mean(scores), rel=1e-12)
    assert statistics.median(scores) == pytest.approx(reference.aggregate_median(scores), rel=1e-12)


@pytest.mark.parametrize("digits", [0, 6], ids=["ties", "no ties"])
def test_probability_of_improvement_equals_rliable(digits):
    x, y = draw(7, 4).round(digits), draw(9, 4, seed=1).round(digits)
    expected = reference.probability_of_improvement(x, y)
    assert statistics.probability_of_improvement(x, y) == pytest.approx(expected, rel=1e-12)
    assert statistics.probability_of_improvement(x, x) == 0.5


def test_one_task_may_be_given_flat():
    x, y = draw(6, 1), draw(8, 1, seed=1)
    assert statistics.iqm(x[:, 0]) == statistics.iqm(x)
    flat = statistics.probability_of_improvement(x[:, 0], y[:, 0])
    assert flat == statistics.probability_of_improvement(x, y)
    assert statistics.bootstrap_interval(x[:, 0]) == statistics.bootstrap_interval(x)


def test_intervals_agree_with_scipys_bootstrap_of_rliables_statistics():
    """Ends from 2,000 resamples each: their own noise is about 0.03 of the interval's width.

    SciPy resamples each argument by itself; with one argument per task that is the stratified bootstrap
    (rliable's own does not run beside pandas 3).
    """
    x, y = draw(10, 3), draw(12, 3, seed=1)
    iqm = lambda *tasks: reference.aggregate_iqm(np.stack(tasks, axis=1))
    better = lambda *tasks: reference.probability_of_improvement(
        np.stack(tasks[:3], 1), np.stack(tasks[3:], 1)
    )
    for ours, scores, theirs, tasks in (
        (statistics.iqm, x, iqm, tuple(x.T)),
        (statistics.probability_of_improvement, (x, y), better, (*x.T, *y.T)),
    ):
        found = scipy.stats.bootstrap(
            tasks,
            theirs,
            n_resamples=2000,
            method="percentile",
            vectorized=False,
            rng=np.random.default_rng(1),
        ).confidence_interval
        interval = statistics.bootstrap_interval(scores, ours)
        np.testing.assert_allclose(interval, found, atol=0.1 * (found.high - found.low))


def test_runs_are_resampled_within_their_task():
    """Two constant tasks: no resampling of runs within tasks can move anything."""
    scores = np.tile([1.0, 5.0], (4, 1))
    assert statistics.bootstrap_interval(scores, statistics.mean) == (3.0, 3.0)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(300):
        low, high = statistics.bootstrap_interval(draw(30, 1, seed), statistics.mean, reps=300)
        covered += low <= 0 <= high
    assert 0.89 < covered / 300 < 0.98  # 95 % nominal, percentile bootstrap at n = 30; binomial 3.5 sigma


def test_an_interval_from_one_seed_is_refused():
    with pytest.raises(ShoalError, match="One run has no interval") as error:
        statistics.bootstrap_interval([3.0])
    assert "--agents" in error.value.hint
    with pytest.raises(ShoalError):
        statistics.bootstrap_interval((np.ones(5), np.ones(1)), statistics.probability_of_improvement)


def test_a_diverged_run_is_not_trimmed_away():
    scores = np.array([1.0, 2.0, np.nan, 3.0])
    assert np.isnan(statistics.iqm(scores))
    assert np.isnan(statistics.bootstrap_interval(scores)).all()
    assert np.isnan(statistics.probability_of_improvement(scores, np.ones(4)))


def test_steps_to_threshold():
    returns = np.array([[1, 9, np.nan], [5, 2, 4], [6, 1, 4]])
    np.testing.assert_array_equal(statistics.steps_to_threshold([10, 20, 30], returns, 5), [20, 10, np.nan])
    assert statistics.steps_to_threshold([10, 20], [0, 7], 5) == 20
