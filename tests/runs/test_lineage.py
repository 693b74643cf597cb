"""Whose state an agent has in the end, and the pictures of a search."""

import numpy as np
import pytest

from shoal.runs.lineage import ancestors, knobs, lineage, programs


def test_the_past_of_an_agent_goes_from_copy_to_copy():
    updates, child, parent = np.array([10, 20, 20, 30]), np.array([1, 2, 1, 3]), np.array([0, 1, 0, 2])
    # 3 became a copy of 2 at 30, which had become one of 1 at 20, which until then was the copy made at 10
    assert ancestors(updates, child, parent, 3, 40) == [(0, 0), (10, 1), (20, 2), (30, 3)]
    assert ancestors(updates, child, parent, 0, 40) == [(0, 0)]


def test_copies_of_one_selection_are_of_what_was_before_it():
    """At 20 both 1 and 2 are replaced, 2 by what 1 was before it became a copy itself."""
    path = ancestors(np.array([20, 20]), np.array([1, 2]), np.array([0, 1]), 2, 40)
    assert path == [(0, 1), (20, 2)]


ROWS = dict(updates=np.array([5, 5, 10, 10]), agent=np.array([0, 1, 0, 1]))


@pytest.mark.parametrize(("parent", "words"), [([0.0], "copies of better ones"), ([np.nan], "new samples")])
def test_the_picture_says_who_replaced_whom(parent, words):
    replaced = dict(
        updates=np.array([5]), agent=np.array([1]), replaced=np.array([1]), parent=np.array(parent)
    )
    page = lineage(replaced, ROWS, {"best_agent": 1}, {"ppo.lr": "…"})
    assert words in page
    assert "<svg" in page
    assert lineage({}, ROWS, {}, {}) == ""


def test_each_knob_has_its_plot_and_programs_are_listed_best_first():
    result = dict(returns=[1.0, 2.0], varied={"ppo.lr": [1e-4, 1e-2], "ppo.clip": [0.1, 0.2]})
    page = knobs(result)
    assert "ppo.lr" in page
    assert "ppo.clip" in page
    assert knobs({"returns": [1.0]}) == ""
    shaped = {"returns": [1.0, 2.0], "varied": {"net": ["mlp", "cnn"], "ppo.lr": [1e-4, 1e-2]}}
    programs_of = [dict(program=f"net={net}", agents=1) for net in ("mlp", "cnn")]
    page = knobs(shaped | {"programs": programs_of})
    for words in (">mlp<", ">cnn<", ">net=mlp<", ">net=cnn<"):  # ticks, and a legend of colours
        assert words in page
    assert ">net=mlp<" not in knobs(shaped)
    row = dict(return_iqm=1.0, agents=1, env_steps_per_s=10.0)
    table = programs(
        {
            "programs": [
                dict(program="net=mlp", return_mean=1.0, **row),
                dict(program="net=cnn", return_mean=2.0, **row),
            ]
        }
    )
    assert table.index("net=cnn") < table.index("net=mlp")
    assert 'href="programs/1/report.html"' in table
