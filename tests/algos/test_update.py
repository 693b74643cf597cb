"""One update, however it is placed: alone or among others, on one device or several."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from probes import LANES, TINY, lane, tiny
from shoal.algos import ppo, update
from shoal.mesh.layout import lay_out
from shoal.ops.parts import parts
from shoal.population.lanes import identities, stacked
from shoal.training.program import Recipe, compile_chunk, compile_init
from shoal.types import Outputs


@pytest.fixture(scope="module")
def population():
    """A population after 0, 1, 2 and 3 updates; each lane with its own learning rate."""
    states = [probes.start(probes.knobs(lr=[1e-2, 1e-3, 3e-3, 1e-2]))]
    for _ in range(3):
        state, metrics = tiny().step(states[-1])
        states.append(state)
    return states, metrics


def close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_a_population_equals_a_loop_over_its_agents(population):
    """Randomness exactly, numbers to tolerance; and the mask of a healthy lane changes nothing."""
    states, metrics = population
    for i in range(LANES):
        alone = lane(states[0], i)
        for _ in range(3):
            alone, alone_metrics = tiny().alone(alone)
        among = lane(states[3], i)
        np.testing.assert_array_equal(alone.actors.episode_length, among.actors.episode_length)
        assert alone_metrics["episodes"] == metrics["episodes"][i]
        close(alone, among, rtol=1e-3, atol=1e-4)
        close(alone_metrics, lane(metrics, i), rtol=1e-2, atol=1e-3)


def test_agents_differ_in_weights_episodes_and_effective_knobs(population):
    states, _ = population
    first, last = states[0], states[3]
    weights = np.asarray(first.learner.params.actor[0].weight)
    assert not np.allclose(weights[0], weights[1])
    assert not np.array_equal(first.actors.obs[0], first.actors.obs[1])
    moved = np.abs(np.asarray(last.learner.params.actor[0].weight) - weights).mean((1, 2))
    assert moved[1] < 0.3 * moved[0]  # a tenth of the learning rate
    assert moved[0] > 0


def test_a_seed_changes_everything_and_the_same_seed_nothing(population):
    states, _ = population
    again, other = (probes.start(probes.knobs(lr=[1e-2, 1e-3, 3e-3, 1e-2]), seed) for seed in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, again, states[0])
    assert not np.any(np.isclose(other.actors.env_state.x, again.actors.env_state.x))
    assert not np.any(np.isclose(other.learner.params.actor[0].weight, again.learner.params.actor[0].weight))


def test_the_state_keeps_its_types_and_none_is_weak(population):
    """A weak type anywhere, or one that changes, would compile every program twice; traces are counted."""
    states, _ = population
    types = [jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) for state in states]
    assert types[0] == types[1] == types[3]
    assert not any(x.weak_type for x in jax.tree.leaves(states))


def test_no_update_repeats_the_draws_of_another(population):
    states, _ = population
    obs = [np.asarray(state.actors.env_state.x).ravel() for state in states]
    assert len(np.unique(np.concatenate(obs))) == sum(map(len, obs))


def test_progress_is_the_share_of_the_budget_spent_before_the_update(population):
    states, _ = population
    np.testing.assert_allclose(states[3].learner.progress, 2 / probes.BUDGET, rtol=1e-6)


def test_env_numbers_are_global():
    axis = update.WHOLE._replace(index=2, size=4)
    assert update.env_index(3, axis).tolist() == [6, 7, 8]


def test_a_minibatch_without_rows_changes_nothing():
    """An all-zero count must give neither NaN nor a step of a stale optimiser."""
    agent = tiny().agent
    nothing = lambda learner, data, rows: (
        jax.tree.map(jnp.zeros_like, learner.params),
        jnp.float32(0),
        update_outputs(),
    )
    update_outputs = lambda: ppo.Outputs({"loss": jnp.float32(0)})
    empty = agent._replace(grad=nothing)
    state = lane(probes.start(probes.knobs()), 0)
    after, metrics = jax.jit(partial(update.update, empty, tiny().env, TINY.num_steps))(state)
    close(after.learner.params, state.learner.params, rtol=0)
    close(after.learner.adam, state.learner.adam, rtol=0)
    assert metrics["loss"] == 0


# --- Over devices -----------------------------------------------------------------------------


def test_four_devices_equal_one_in_float64_to_1e_9():
    """Same global batch, same parameters: statistics, shuffles and sums do not see the devices."""
    start = jax.tree.map(lambda x: x[:1], probes.start(probes.knobs()))
    with jax.enable_x64(True):
        wide = probes.wide(start)
        one, four = (probes.placed(tiny().env, ppo, TINY, wide, shards) for shards in (1, 4))
        assert one[0].learner.params.actor[0].weight.dtype == jnp.float64
        close(one, four, rtol=1e-9, atol=1e-9)
        moved = one[0].learner.params.actor[0].weight - wide.learner.params.actor[0].weight
        assert np.abs(moved).max() > 1e-3


def test_the_training_program_on_two_devices_equals_the_update_of_one_agent(population):
    states, _ = population
    recipe = Recipe(tiny().agent, tiny().env, ppo.Knobs(), tiny().env.default_params(), TINY.num_envs, 8)
    layout = lay_out(tuple(jax.devices()[:2]), 1, TINY.strata)
    assert layout.data_shards == 2
    init, (chunk, _) = compile_init(recipe, layout), compile_chunk(recipe, layout)
    knobs = jax.tree.map(lambda x: x[:1], probes.knobs())
    params = stacked(recipe.env_params, 1)
    state = init(identities(0, 1, probes.BUDGET, 1), knobs, params)
    close(state, jax.tree.map(lambda x: x[:1], states[0]), rtol=1e-6, atol=1e-6)
    state, metrics = jax.block_until_ready(chunk(state, np.int32(3)))
    assert metrics["updates"].tolist() == [3]
    close(lane(state, 0), lane(states[3], 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at_once", [1, 4, 5, 8, 16])
def test_a_minibatch_in_parts_has_the_gradient_of_the_whole(at_once):
    """Sums add up whatever the parts; samples come back in their rows' order, leaves without rows once."""
    rng = np.random.default_rng(0)
    rows = {"x": jnp.asarray(rng.normal(size=(16, 3)), jnp.float32), "turn": jnp.bool_(True)}

    def grad(learner, data, rows):
        error = rows["x"] @ learner
        sums = {"error": jnp.sum(error)}
        outputs = Outputs(sums, {"error": error, "turn": rows["turn"]})
        return rows["x"].T @ error, jnp.float32(error.size), outputs

    agent = tiny().agent._replace(grad=grad)
    learner = jnp.asarray([1.0, 2.0, -1.0])
    whole = update.summed_gradient(agent, learner, (), rows)
    pieces = update.summed_gradient(agent, learner, (), rows, partial(parts, most=at_once))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, pieces)


# --- Before the first update ------------------------------------------------------------------


NORMALISING = ppo.Sizes(num_envs=4, num_steps=8, minibatches=2, normalize_obs=True, normalize_reward=True)


def warmed_up(rollouts: int):
    """An agent before and after a warm-up."""
    env = probes.walk()
    state = lane(probes.alone(env, ppo, NORMALISING, ppo.Knobs()), 0)
    warm = jax.jit(partial(update.warm_up, probes.agent_for(env, ppo, NORMALISING), env, 8))
    return state, warm(state, jnp.int32(rollouts))


def test_a_warm_up_moves_statistics_and_envs_and_nothing_else():
    before, after = warmed_up(3)
    moved = {"obs_moments", "return_moments", "local"}
    for name in set(before.learner._fields) - moved:
        close(getattr(after.learner, name), getattr(before.learner, name), rtol=0)
    close(after.identity, before.identity, rtol=0)
    assert after.learner.obs_moments.count == after.learner.return_moments.count == 3 * 4 * 8
    assert not np.array_equal(after.actors.obs, before.actors.obs)
    assert after.episodes.count == 0  # they are none of training's


def test_a_warm_up_draws_what_no_update_draws():
    """Two of one rollout each would see the same envs' steps if numbers repeated."""
    _, one = warmed_up(1)
    env = probes.walk()
    agent = probes.agent_for(env, ppo, NORMALISING)
    start = lane(probes.alone(env, ppo, NORMALISING, ppo.Knobs()), 0)
    first, _ = jax.jit(partial(update.update, agent, env, 8))(start)
    assert not np.any(np.isclose(one.actors.env_state.x, first.actors.env_state.x))


def test_no_warm_up_changes_nothing():
    before, after = warmed_up(0)
    close(after, before, rtol=0)
