"""Sweeps: what can be written, what is refused, which programs and which values come of it."""

import numpy as np
import pytest

from shoal.app import sweep
from shoal.app.assembly import assemble, planned, starting
from shoal.app.config import resolve
from shoal.errors import ShoalError

TINY = {"ppo": {"num_envs": 2, "num_steps": 8, "minibatches": 2, "hidden": (8,)}}


def settings(*axes, dotted=None, **flat):
    return resolve({"agents": 6, "steps": 1000, "sweep": axes} | flat, TINY | (dotted or {}))


def values(*axes, agents=None, **flat):
    made = assemble(settings(*axes, **flat))
    ids = np.arange(made.plan.agents if agents is None else agents, dtype=np.int32)
    return starting(made, ids)


def test_a_range_is_drawn_and_a_list_is_dealt_out():
    knobs, params = values("ppo.lr=log:1e-4..1e-2", "ppo.ent_coef=0,0.01", "env.gravity=5..15")
    assert ((knobs.lr > 1e-4) & (knobs.lr < 1e-2)).all()
    assert len(set(knobs.lr.tolist())) == 6
    assert knobs.ent_coef.tolist() == [0.0, np.float32(0.01)] * 3
    assert ((params.gravity > 5) & (params.gravity < 15)).all()
    assert knobs.lr.dtype == params.gravity.dtype == np.float32
    assert (knobs.clip == np.float32(0.2)).all()


def test_an_agent_s_values_do_not_depend_on_how_many_there_are():
    knobs, _ = values("ppo.lr=log:1e-4..1e-2", "ppo.clip=0.1,0.2,0.3")
    more, _ = values("ppo.lr=log:1e-4..1e-2", "ppo.clip=0.1,0.2,0.3", agents=20)
    np.testing.assert_array_equal(more.lr[:6], knobs.lr)
    np.testing.assert_array_equal(more.clip[:6], knobs.clip)


def test_lists_make_a_grid_and_a_range_may_be_cut_into_one():
    knobs, _ = values("ppo.clip=0.1,0.2", "ppo.gamma=0.9..0.98:3")
    assert {(round(float(c), 3), round(float(g), 3)) for c, g in zip(knobs.clip, knobs.gamma)} == {
        (c, g) for c in (0.1, 0.2) for g in (0.9, 0.94, 0.98)
    }
    lr, _ = values("ppo.lr=log:1e-4..1e-2:3")
    np.testing.assert_allclose(lr.lr, [1e-4, 1e-3, 1e-2] * 2, rtol=1e-5)


def test_what_shapes_the_program_divides_the_agents_into_programs():
    parts = sweep.programs(settings("ppo.hidden=8,8;16", "ppo.lr=log:1e-4..1e-2", "net=mlp,auto", agents=9))
    assert [part.label for part in parts] == [
        "ppo.hidden=8,8 net=mlp",
        "ppo.hidden=8,8 net=auto",
        "ppo.hidden=16 net=mlp",
        "ppo.hidden=16 net=auto",
    ]
    assert [part.train.agents for _, part in parts] == [3, 2, 2, 2]
    assert [part.algo["hidden"] for _, part in parts] == [(8, 8), (8, 8), (16,), (16,)]
    assert [part.train.net for _, part in parts] == ["mlp", "auto"] * 2
    assert all(part.train.sweep == ("ppo.lr=log:1e-4..1e-2",) for _, part in parts)
    assert all(part.origins["ppo.hidden"] == "sweep" for _, part in parts)


def test_a_sweep_over_knobs_alone_is_one_program():
    ((shape, part),) = sweep.programs(settings("ppo.lr=log:1e-4..1e-2", "env.gravity=1,2"))
    assert shape == {}
    assert part.train.agents == 6


@pytest.mark.parametrize(
    ("axes", "message", "hint"),
    [
        (["ppo.lrr=1,2"], "cannot vary ppo.lrr", "did you mean ppo.lr"),
        (["steps=1,2"], "cannot vary steps", ""),
        (["ppo.lr"], "names no values", "write a range"),
        (["ppo.lr="], "names no values", "write a range"),
        (["ppo.lr=1e-3"], "changes nothing", "write a range"),
        (["ppo.lr=1e-3,1e-3"], "repeats a value", ""),
        (["ppo.lr=1e-3,0.001"], "repeats a value", ""),
        (["ppo.lr=1e-3..1e-3"], "should be below", ""),
        (["ppo.lr=1..2:1"], "changes nothing", "at least two"),
        (["ppo.lr=log:0..1"], "starts above 0", "ppo.lr=0..1"),
        (["ppo.lr=1e-3..inf"], "should be below", ""),
        (["ppo.lr=a..b"], "is not a number", ""),
        (["ppo.lr=1e-3,x"], "is not a number", ""),
        (["ppo.gamma=0.9..1.1"], "1.1 is not from 0 to 1", ""),
        (["env.gravitty=1,2"], "no setting env.gravitty", "did you mean env.gravity"),
        (["ppo.clip=0.1,0.2", "ppo.clip=0.3,0.4"], "given twice", ""),
        (["ppo.clip=0.1,0.2,0.3", "ppo.gamma=0.9,0.95,0.99"], "grid of 9 points for 6 agents", "--agents 9"),
        (["ppo.hidden=8..64"], "a range is endless", ""),
        (["ppo.hidden=8;8"], "repeats a value", ""),
        (["ppo.minibatches=2,3"], "not divisible", ""),
        (["ppo.epochs=1,2,3,4,5,6,7"], "7 programs for 6 agents", "--agents 7"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_with_what_could(axes, message, hint):
    given = settings(*axes)
    with pytest.raises(ShoalError, match=message) as error:
        [assemble(part) for _, part in sweep.programs(given)]
    assert hint in error.value.hint


def test_an_axis_that_the_program_never_reads_is_refused():
    (axis,) = assemble(settings("ppo.lr=1e-4,1e-3")).axes
    with pytest.raises(ShoalError, match=r"ppo\.lr changes nothing"):
        sweep.refuse_idle((axis,), {"lr"}, set(), "ppo")
    with pytest.raises(ShoalError, match=r"env\.length changes nothing: this env does not use it"):
        assemble(settings("env.length=1,2", env="idle:make"))


def test_a_grid_that_agents_do_not_fill_evenly_is_told():
    noted = lambda *axes: " ".join(planned(assemble(settings(*axes)), 0).notes)
    assert "4 points of a grid are dealt out unevenly to 6 agents" in noted(
        "ppo.lr=0.1,0.2", "ppo.clip=0.1,0.2"
    )
    assert "unevenly" not in noted("ppo.lr=0.1,0.2", "ppo.clip=0.1..0.3")


def test_pbt_without_a_sweep_varies_what_the_algorithm_names():
    made = assemble(settings(pbt=True))
    assert [axis.name for axis in made.axes] == ["ppo.lr", "ppo.ent_coef"]
    assert made.plan.select_every == 3
    assert assemble(settings(pbt=True, pbt_every=7)).plan.select_every == 7


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (dict(pbt=True, halving=True), "exclude each other"),
        (dict(pbt_every=3), "without --pbt"),
        (dict(pbt=True, steps=16), "nothing to compare"),
        (dict(pbt=True, pbt_every=100), "compared every 100 updates, and the run has 63"),
        (dict(halving=True, steps=16), "nothing to compare"),
    ],
)
def test_selections_that_cannot_happen_are_refused(flat, message):
    with pytest.raises(ShoalError, match=message):
        assemble(settings(**flat))


def test_a_sweep_may_be_a_dict_in_python():
    given = {"ppo.lr": "log:1e-4..1e-2", "ppo.ent_coef": [0, 0.01], "ppo.hidden": [(8, 8), (16,)]}
    assert sweep.written(given) == ("ppo.lr=log:1e-4..1e-2", "ppo.ent_coef=0,0.01", "ppo.hidden=8,8;16")
    assert sweep.written("ppo.lr=1,2") == ("ppo.lr=1,2",)


def test_points_of_a_range_keep_its_ends_exactly():
    assert sweep.read("dqn.buffer_size=1048576..2097152:2").values == ("1048576", "2097152")
    assert sweep.read("ppo.lr=log:1e-4..1e-2:3").values == ("0.0001", "0.001", "0.01")


@pytest.mark.parametrize("text", ["ppo.lr=LOG:1e-3..1e-2", "ppo.lr=1..", "ppo.lr=..1", "ppo.lr=1..2:3:4"])
def test_what_looks_like_a_range_and_is_none_says_so(text):
    with pytest.raises(ShoalError, match="is not a range"):
        sweep.read(text)


def test_a_range_of_endless_points_is_refused():
    with pytest.raises(ShoalError, match="more values than 10,000"):
        sweep.read("ppo.lr=1..2:999999999")
