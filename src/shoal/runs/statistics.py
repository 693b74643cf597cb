"""What several runs say together: robust averages and honest intervals, in NumPy alone.

After Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice", whose
reference implementation is rliable. Scores are `[runs]` or `[runs, tasks]`, one final score each; a
score of NaN (a diverged run) makes its statistic NaN: leave it out, and say so, or count it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.errors import ShoalError

Statistic = Callable[..., float]  # (scores, ...) -> float


def mean(scores: Any) -> float:
    """The mean of all scores."""
    return float(np.mean(scores))


def median(scores: Any) -> float:
    """The median score; with tasks, the median over tasks of their mean scores, as the field reports it."""
    scores = np.asarray(scores)
    return float(np.median(scores if scores.ndim == 1 else scores.mean(axis=0)))


def iqm(scores: Any) -> float:
    """Interquartile mean: the mean of the middle half of all scores, runs and tasks together.

    As robust as the median, nearly as efficient as the mean. Equals `scipy.stats.trim_mean(…, 0.25)`.
    """
    ordered = np.sort(np.asarray(scores, float), axis=None)  # NaN last
    cut = len(ordered) // 4
    return float(ordered[-1] if np.isnan(ordered[-1]) else ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(x: Any, y: Any) -> float:
    """P(a run of X scores higher than a run of Y), ties counting half, averaged over tasks.

    `x` [runs_x] or [runs_x, tasks], `y` likewise: the Mann–Whitney U statistic over its maximum.
    """
    per_task = []
    for one, other in zip(_by_task(x).T, _by_task(y).T, strict=True):
        other = np.sort(other)
        below, not_above = (np.searchsorted(other, one, side) for side in ("left", "right"))
        undefined = np.isnan(one).any() or np.isnan(other).any()
        per_task.append(np.nan if undefined else (below + not_above).mean() / (2 * len(other)))
    return float(np.mean(per_task))


def bootstrap_interval(
    scores: Any, statistic: Statistic = iqm, reps: int = 2000, alpha: float = 0.05, seed: int = 0
) -> tuple[float, float]:
    """The `1 - alpha` percentile interval of a statistic under resampled runs, within each task.

    A tuple of score arrays is resampled independently and passed on as several arguments:
    `bootstrap_interval((x, y), probability_of_improvement)`. It says how far other seeds might have
    moved the result, not other tasks. ShoalError for a single run, which says nothing about that.
    """
    samples = [np.asarray(part, float) for part in (scores if isinstance(scores, tuple) else (scores,))]
    if min(map(len, samples)) < 2:
        raise ShoalError(
            "One run has no interval: nothing tells how far another seed would be",
            "Train more agents at once (--agents 10), or give several runs.",
        )
    rng = np.random.default_rng(seed)
    values = [
        statistic(*(np.take_along_axis(x, rng.integers(len(x), size=x.shape), axis=0) for x in samples))
        for _ in range(reps)
    ]
    low, high = np.quantile(values, [alpha / 2, 1 - alpha / 2])
    return float(low), float(high)


def steps_to_threshold(env_steps: Any, returns: Any, threshold: float) -> np.ndarray:
    """The first env steps at which each run's return reached `threshold`; NaN where it never did.

    `env_steps` [points], rising; `returns` [points] or [points, runs]; the result [] or [runs].
    """
    reached = np.asarray(returns, float) >= threshold
    return np.where(reached.any(axis=0), np.asarray(env_steps)[reached.argmax(axis=0)], np.nan)


def _by_task(scores: Any) -> np.ndarray:
    scores = np.asarray(scores, float)
    return scores if scores.ndim == 2 else scores[:, None]
