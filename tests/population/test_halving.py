"""Successive halving: rungs, and who goes on, against the rule written out."""

import math

import numpy as np
import pytest

from shoal.population.halving import Judged, judge, rungs

NAN, LOST = float("nan"), -float("inf")


@pytest.mark.parametrize(
    ("updates", "expected"), [(1, ()), (2, (1,)), (27, (1, 3, 9)), (196, (8, 24, 72)), (100, (4, 12, 36))]
)
def test_rungs_are_multiples_of_the_first_and_below_the_budget(updates, expected):
    assert rungs(updates) == expected


def at(age, number):
    return np.full(number, age)


def test_the_best_third_goes_on():
    stopped, history = judge((), 27, 26, at(1, 9), np.arange(9.0))
    assert stopped.tolist() == [True] * 6 + [False] * 3
    assert [row.rung for row in history] == [1] * 9


def test_later_agents_are_judged_against_all_earlier_ones():
    _, history = judge((), 27, 26, at(1, 9), np.arange(9.0))
    stopped, history = judge(history, 27, 25, at(1, 2), np.array([5.0, 8.5]))
    assert stopped.tolist() == [True, False]
    assert len(history) == 11


@pytest.mark.parametrize("seed", range(10))
def test_whoever_is_stopped_is_not_among_the_best_third_of_its_rung(seed):
    rng = np.random.default_rng(seed)
    history: list = []
    for _ in range(6):
        ages = rng.choice([1, 2, 3, 9, 20], 8)
        scores = rng.normal(size=8)
        stopped, history = judge([list(row) for row in history], 27, 20, ages, scores)  # as read from JSON
        for age, score, stop in zip(ages, scores, stopped):
            if age not in rungs(27):
                assert not stop
                continue
            seen = [row.score for row in history if row.rung == age]
            better = sum(other > score for other in seen)
            assert stop == (better >= math.ceil(len(seen) / 3))


def test_an_agent_without_a_score_is_not_judged_and_one_that_diverged_stops_at_any_age():
    stopped, history = judge((), 27, 26, np.array([1, 1, 2, 1]), np.array([NAN, 3.0, LOST, LOST]))
    assert stopped.tolist() == [False, False, True, True]
    assert history == [Judged(1, 3.0), Judged(1, LOST)]


def test_nobody_makes_room_for_who_could_not_reach_the_first_rung():
    scores = np.array([0.0, 1.0, 2.0, LOST])
    for left, any_stopped in ((4, True), (3, False)):
        stopped, history = judge((), 100, left, at(12, 4), scores)
        assert stopped.any() == any_stopped
        assert len(history) == 4
