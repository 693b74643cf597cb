"""Selection copies the best onto the worst, but nobody's identity; everything else is as it was."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from probes import lane, tiny
from shoal.population.pbt import parents, scores, select
from shoal.population.search import Axis

LR = Axis("ppo.lr", 1e-4, 1e-1, log=True)
CLIP = Axis("ppo.clip", 0.0, 0.4)
NAN, LOST = float("nan"), -float("inf")


def obvious(score, share):
    """The rule, one agent at a time."""
    known = sorted((s, i) for i, s in enumerate(score) if s == s)
    cut = max(1, len(known) // 4) if len(known) > 1 else 0
    chosen = list(range(len(score)))
    for s, i in known[:cut]:
        best = known[len(known) - 1 - min(int(share[i] * cut), cut - 1)]
        if best[0] > s:
            chosen[i] = best[1]
    return chosen


@pytest.mark.parametrize("seed", range(20))
def test_parents_are_those_of_the_obvious_rule(seed):
    rng = np.random.default_rng(seed)
    score = rng.integers(0, 6, rng.integers(1, 20)).astype(np.float32)
    score[rng.random(len(score)) < 0.2] = NAN
    score[rng.random(len(score)) < 0.1] = LOST
    share = rng.random(len(score)).astype(np.float32)
    got = parents(jnp.asarray(score), jnp.asarray(share))
    assert got.tolist() == obvious(score.tolist(), share.tolist())


@pytest.mark.parametrize("agents", [2, 3])
def test_of_two_or_three_agents_the_worst_copies_the_best(agents):
    assert parents(jnp.arange(agents, dtype=jnp.float32), jnp.zeros(agents)).tolist() == [
        agents - 1,
        *range(1, agents),
    ]
    assert parents(jnp.ones(1), jnp.zeros(1)).tolist() == [0]


def test_nobody_copies_an_equal_or_lost_agent():
    assert parents(jnp.ones(8), jnp.zeros(8)).tolist() == list(range(8))
    assert parents(jnp.full(8, LOST), jnp.zeros(8)).tolist() == list(range(8))
    assert parents(jnp.full(8, NAN), jnp.zeros(8)).tolist() == list(range(8))


@pytest.fixture(scope="module")
def trained():
    state = probes.start(probes.knobs(clip=[0.0, 0.1, 0.2, 0.3]))
    for _ in range(3):
        state, _ = tiny().step(state)
    counted = state.episodes._replace(
        count=jnp.asarray([2.0, 4.0, 1.0, 1.0]), return_sum=jnp.asarray([2.0, 40.0, 7.0, 8.0])
    )
    return state._replace(episodes=counted)


chosen = jax.jit(partial(select, (LR, CLIP), jnp.int32(3)))


def test_a_copy_takes_everything_but_the_identity(trained):
    after, selection = chosen(trained)
    assert selection.parent.tolist() == [1, 1, 2, 3]
    assert selection.score.tolist() == [1.0, 10.0, 7.0, 8.0]
    same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    same(after.identity, trained.identity)
    kept = lambda state, i: lane(state._replace(identity=(), episodes=()), i)
    for i in (1, 2, 3):
        same(kept(after, i), kept(trained, i))
    child, parent = kept(after, 0), kept(trained, 1)
    same(child.actors, parent.actors)
    same(child.learner._replace(knobs=()), parent.learner._replace(knobs=()))
    assert child.learner.knobs.lr != parent.learner.knobs.lr
    assert child.learner.knobs._replace(lr=0, clip=0) == parent.learner.knobs._replace(lr=0, clip=0)
    assert jax.tree.leaves(after.episodes)[0].tolist() == [0.0] * 4


def test_a_copy_goes_on_with_random_streams_of_its_own(trained):
    after, _ = chosen(trained)
    ahead, _ = tiny().step(after)
    actions = lambda i: np.asarray(lane(ahead.actors.env_state, i).x)
    assert not np.array_equal(actions(0), actions(1))


@pytest.mark.parametrize(("old", "new"), [(1e-2, 0.0), (0.0, 1e-2)])
def test_moved_knobs_and_params_are_those_of_the_next_update(trained, old, new):
    """A learning rate of 0 stands still, and where p_end is 1 every step ends an episode."""
    only = lambda name, value: Axis(name, value, value, choices=(value,))
    knobs = trained.learner.knobs._replace(lr=jnp.full(4, old))
    state = trained._replace(learner=trained.learner._replace(knobs=knobs))
    axes = only("ppo.lr", new), only("env.p_end", 1.0)
    after, selection = jax.jit(partial(select, axes, jnp.int32(3)))(state)
    assert selection.parent.tolist() == [1, 1, 2, 3]
    ahead, metrics = tiny().step(after)
    weight = lambda state: np.asarray(state.learner.params.critic[0].weight)
    learned = (weight(ahead) != weight(after)).any((1, 2))
    assert learned.tolist() == [new > 0] + 3 * [old > 0]
    steps = probes.TINY.num_envs * probes.TINY.num_steps
    assert (metrics["episodes"] == steps).tolist() == [True, False, False, False]


def test_a_diverged_agent_is_replaced_and_active_again(trained):
    active = jnp.asarray([True, True, False, True])
    sick = trained._replace(identity=trained.identity._replace(active=active))
    assert scores(sick).tolist() == [1.0, 10.0, LOST, 8.0]
    after, selection = chosen(sick)
    assert selection.parent.tolist() == [0, 1, 1, 3]
    assert after.identity.active.all()
    assert after.identity.updates.tolist() == sick.identity.updates.tolist()


def test_agents_without_an_episode_and_lanes_without_an_agent_take_no_part(trained):
    identity = trained.identity._replace(budget=jnp.asarray([0, 100, 100, 100], jnp.int32))
    some = trained._replace(
        identity=identity, episodes=trained.episodes._replace(count=jnp.asarray([2.0, 0.0, 1.0, 1.0]))
    )
    after, selection = chosen(some)
    assert selection.parent.tolist() == [0, 1, 3, 3]  # of the other two the better is copied
    assert np.isnan(selection.score[:2]).all()
    assert after.episodes.count.tolist() == [2.0, 0.0, 0.0, 0.0]
    assert after.episodes.return_sum.tolist() == [2.0, 40.0, 0.0, 0.0]
