"""Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934): who goes on, and who makes room.

An agent is judged when its updates reach a rung. It goes on if its score is in the best third of all that
were ever judged at that rung; else its lane is given to a new sample, in the same program.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

KEEP = 3  # one in so many goes on
RUNGS = 3  # at most; the first is at 1/27 of the budget


class Judged(NamedTuple):
    """One judgement, kept with the run so that later ones can be made against it."""

    rung: int
    score: float


def rungs(updates: int) -> tuple[int, ...]:
    """Updates of an agent at which it is judged, of a budget of `updates`; multiples of the first."""
    first = math.ceil(updates / KEEP**RUNGS)
    return tuple(first * KEEP**i for i in range(RUNGS) if first * KEEP**i < updates)


def over(history: Sequence[Judged], updates: int) -> bool:
    """Whether any was judged at rungs of another budget, so that new judgements would not compare."""
    return any(Judged(*row).rung not in rungs(updates) for row in history)


def judge(
    history: Sequence[Judged], updates: int, left: int, ages: np.ndarray, scores: np.ndarray
) -> tuple[np.ndarray, list[Judged]]:
    """Who is stopped, bool [P], and the history with this round's judgements.

    left: updates left of `updates`; nobody makes room for a newcomer who could not reach the first rung.
    ages [P]: updates done by each lane's agent; scores [P]: NaN, which is never judged, for an agent that
    has finished no episode or a lane without one; -inf for one that has diverged, which always stops.
    """
    history, stopped = [Judged(*row) for row in history], np.zeros(len(ages), bool)
    for rung in rungs(updates):
        here = (ages == rung) & ~np.isnan(scores)
        history += [Judged(rung, float(score)) for score in scores[here]]
        seen = np.sort([row.score for row in history if row.rung == rung])[::-1]
        if here.any():
            stopped |= here & (scores < seen[math.ceil(len(seen) / KEEP) - 1])
    stopped |= scores == -np.inf
    return stopped & (left >= rungs(updates)[0]), history
