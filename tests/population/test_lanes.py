"""Lanes: a masked one stands still, a diverged one is frozen, and neighbours never notice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from probes import BUDGET, LANES, lane, tiny
from shoal.algos import ppo
from shoal.errors import ShoalError
from shoal.population.lanes import all_finite, contained, enter, identities, leave, refill, resize, stacked

MISSING = float("nan")


def advance(state, updates=3):
    for _ in range(updates):
        state, metrics = tiny().step(state)
    return state, metrics


def data(tree):
    """Keys, if any, as numbers, so that NumPy can compare them."""
    return jax.tree.map(np.asarray, tree)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, data(a), data(b))


@pytest.fixture(scope="module")
def healthy():
    state = probes.start(probes.knobs())
    return state, *advance(state)


@pytest.mark.parametrize("lr", [float("inf"), MISSING])
def test_a_diverged_agent_is_frozen_before_the_update_and_its_neighbours_do_not_notice(healthy, lr):
    start, after, metrics = healthy
    sick, sick_metrics = advance(probes.start(probes.knobs(lr=[1e-2, lr, 1e-2, 1e-2])))
    for i in (0, 2, 3):
        same(lane(sick, i), lane(after, i))
        same(lane(sick_metrics, i), lane(metrics, i))
    frozen, before = lane(sick, 1), lane(start, 1)
    assert not frozen.identity.active
    assert frozen.identity.updates == 0
    same(frozen.learner.params, before.learner.params)
    same(frozen.learner.adam, before.learner.adam)
    same(frozen.actors, before.actors)
    assert all(value[1] == 0 for value in sick_metrics.values())


def test_an_agent_that_diverges_later_keeps_its_last_healthy_state(healthy):
    start, *_ = healthy
    one, _ = advance(start, 1)
    lr = one.learner.knobs.lr.at[2].set(MISSING)
    sick = one._replace(learner=one.learner._replace(knobs=one.learner.knobs._replace(lr=lr)))
    after, _ = advance(sick, 2)
    assert after.identity.updates.tolist() == [3, 3, 1, 3]
    assert after.identity.active.tolist() == [True, True, False, True]
    same(lane(after.learner.params, 2), lane(one.learner.params, 2))


def test_a_nan_anywhere_in_what_was_learned_freezes_its_lane(healthy):
    """In Adam's moments, say, while the parameters are finite still: an update later they are not."""
    before = lane(healthy[0], 0)
    parts, tree = jax.tree.flatten_with_path(before.learner)
    frozen = set()
    for i, (path, part) in enumerate(parts):
        if jnp.issubdtype(part.dtype, jnp.floating):
            leaves = [leaf for _, leaf in parts]
            leaves[i] = jnp.ravel(part).at[-1].set(MISSING).reshape(part.shape)
            sick = before._replace(learner=jax.tree.unflatten(tree, leaves))
            after, _ = contained(lambda state: (sick, {}))(before)  # noqa: B023
            if not after.identity.active:
                frozen.add(path[0].name)
                same(after.learner, before.learner)
            else:
                assert path[0].name == "knobs"
    assert frozen == {"params", "adam", "progress", "obs_moments", "return_moments", "local"}


def test_an_infinite_knob_is_not_a_divergence():
    state, metrics = advance(probes.start(probes.knobs(max_grad_norm=[0.5, float("inf"), 0.5, 0.5])), 2)
    assert state.identity.active.all()
    assert metrics["updates"].tolist() == [1] * LANES
    assert not np.allclose(state.learner.params.critic[0].weight[1], 0)


def test_a_masked_lane_does_not_move(healthy):
    start, after, _ = healthy
    active = jnp.asarray([True, False, True, True])
    masked = start._replace(identity=start.identity._replace(active=active))
    state, metrics = advance(masked)
    same(lane(state, 1), lane(masked, 1))
    assert metrics["updates"].tolist() == [1, 0, 1, 1]
    same(lane(state, 2), lane(after, 2))


def test_a_spent_budget_stops_its_lane_exactly_and_leaves_it_active(healthy):
    start, after, _ = healthy
    budget = jnp.asarray([2, BUDGET, 0, BUDGET], jnp.int32)
    state, _ = advance(start._replace(identity=start.identity._replace(budget=budget)))
    assert state.identity.updates.tolist() == [2, 3, 0, 3]
    assert state.identity.active.all()
    same(lane(state, 1), lane(after, 1))
    same(lane(state.learner.params, 2), lane(start.learner.params, 2))


def test_resize_pads_with_inactive_lanes_of_their_own_id_and_cuts_them_off_again(healthy):
    _, state, _ = healthy
    wide = resize(state, 6)
    assert wide.identity.active.tolist() == [True] * 4 + [False] * 2
    assert wide.identity.agent.tolist() == list(range(6))
    assert all(leaf.shape[0] == 6 for leaf in jax.tree.leaves(wide))
    same(resize(wide, 4), state)
    same(resize(state, 4), state)
    assert jax.tree.map(lambda x: x.dtype, wide) == jax.tree.map(lambda x: x.dtype, state)


def test_resize_does_not_revive_a_frozen_lane(healthy):
    _, state, _ = healthy
    state = state._replace(identity=state.identity._replace(active=jnp.asarray([True, False, True, True])))
    assert resize(state, 6).identity.active.tolist() == [True, False, True, True, False, False]


def test_identities_are_counted_up_and_padding_is_inactive():
    who = identities(7, 3, 50, 4)
    assert who.agent.tolist() == [0, 1, 2, 3]
    assert who.active.tolist() == [True, True, True, False]
    assert who.seed.tolist() == [7] * 4
    assert who.budget.tolist() == [50] * 3 + [0]
    assert [leaf.dtype for leaf in who] == [np.uint32, np.int32, np.int32, np.int32, np.bool_]


def test_stacked_values_are_strongly_typed():
    tree = stacked(ppo.Knobs(), 3)
    assert all(leaf.shape == (3,) and leaf.dtype == np.float32 for leaf in tree)
    assert stacked(probes.Rung(2), 3).rung.dtype == np.int32


def test_all_finite_looks_at_every_float_and_at_floats_only():
    assert all_finite({"a": jnp.ones(3), "b": jnp.ones(2, jnp.int32)})
    assert not all_finite({"a": jnp.ones(3), "b": jnp.asarray([1.0, jnp.inf])})
    assert not all_finite((jnp.asarray(MISSING),))
    assert all_finite({"b": jnp.ones(2, jnp.int32)})
    assert all_finite(jnp.full(1000, 3e38))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_all_finite_is_not_optimised_away(bad):
    x = jnp.ones((3, 70)).at[1, 69].set(bad)
    assert jax.jit(jax.vmap(all_finite))({"a": x, "b": jnp.ones(3)}).tolist() == [True, False, True]


def test_an_agent_that_enters_another_lane_goes_on_with_its_own_bits_and_its_neighbours_keep_theirs(healthy):
    start, after, _ = healthy
    guest = leave(start, 2)
    moved = enter(start, 0, guest)
    state, _ = advance(moved)
    same(lane(state, 0), lane(after, 2))
    for i in (1, 2, 3):
        same(lane(state, i), lane(after, i))


def test_refilled_lanes_hold_the_newcomers_and_the_others_what_they_held(healthy):
    start, after, _ = healthy
    state = refill(after, jnp.asarray([False, True, False, True]), start)
    for i, source in enumerate((after, start, after, start)):
        same(lane(state, i), lane(source, i))


@pytest.mark.parametrize("lane", [-1, 4, 100])
def test_a_lane_that_is_not_there_is_an_error(lane):
    state = probes.start(probes.knobs())
    lanes = state.identity.active.shape[0]
    with pytest.raises(ShoalError, match=f"there is no lane {lane}: the population has {lanes}"):
        leave(state, lane)
    with pytest.raises(ShoalError, match="there is no lane"):
        enter(state, lane, leave(state, 0))
    with pytest.raises(ShoalError, match=r"lanes has shape \[1\], expected"):
        refill(state, jnp.ones(1, bool), state)
