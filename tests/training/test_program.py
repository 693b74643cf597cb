"""Programs that put agents into lanes: only values change, wherever the lanes live."""

import jax
import numpy as np
import pytest

import probes
from probes import TINY, agent_for
from shoal.algos import ppo, sac
from shoal.errors import ShoalError
from shoal.mesh import layout as layouts
from shoal.mesh.layout import lay_out
from shoal.population.lanes import identities, leave, stacked
from shoal.training.program import Recipe, compile_chunk, compile_entry, compile_init, unread


@pytest.fixture(scope="module")
def programs():
    env = probes.walk()
    sizes = TINY.num_envs, TINY.num_steps, TINY.minibatches
    recipe = Recipe(agent_for(env, ppo, TINY), env, ppo.Knobs(), env.default_params(), *sizes)
    layout = lay_out(tuple(jax.devices()[:2]), 4, TINY.strata)
    start = compile_init(recipe, layout)(
        identities(0, 4, 50, 4), stacked(recipe.knobs, 4), stacked(recipe.env_params, 4)
    )
    return recipe, layout, start


def test_an_agent_goes_on_in_another_lane_of_the_same_compiled_program(programs):
    """It leaves a lane on one device, enters one on another, and has the bits of having stayed."""
    recipe, layout, start = programs
    (chunk, _), enter = compile_chunk(recipe, layout), compile_entry(recipe, layout)
    copy = lambda state: jax.tree.map(lambda x, old: jax.device_put(np.array(x), old.sharding), state, start)
    stayed, _ = chunk(copy(start), np.int32(3))
    guest = jax.tree.map(np.array, leave(start, 0))
    moved, _ = chunk(enter(copy(start), np.int32(3), guest), np.int32(3))
    for lane, source in enumerate((0, 1, 2, 0)):
        same = lambda a, b, lane=lane, source=source: np.testing.assert_array_equal(a[lane], b[source])
        jax.tree.map(same, jax.device_get(moved), jax.device_get(stayed))


def test_lanes_that_train_one_after_another_learn_what_they_learn_together(programs, monkeypatch):
    """Eight lanes on two devices: as one block of four each, and as two blocks of two."""
    recipe, two, _ = programs
    layout = two._replace(agents=8, lanes=8)
    agents = identities(5, 8, 50, 8), stacked(recipe.knobs, 8), stacked(recipe.env_params, 8)
    agents[1].lr[:] = np.linspace(1e-4, 1e-2, 8)
    rows = recipe.num_envs * recipe.num_steps // recipe.minibatches
    ends, mapped = [], []
    one_by_one = jax.lax.map
    monkeypatch.setattr(jax.lax, "map", lambda f, xs: mapped.append(xs) or one_by_one(f, xs))
    for at_once in (4, 2):
        monkeypatch.setattr(layouts, "LANE_ROWS", at_once * rows)
        mapped.clear()
        start = compile_init(recipe, layout)(*agents)
        ends.append(jax.device_get(compile_chunk(recipe, layout)[0](start, np.int32(3))))
        blocks = [xs.identity.seed.shape for xs in mapped if hasattr(xs, "identity")]
        assert blocks == ([(2, 2)] if at_once == 2 else [])
    (together, sums), (apart, sums_apart) = ends
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(same, (together, sums), (apart, sums_apart))
    np.testing.assert_array_equal(together.identity.updates, 3)
    assert len(np.unique(sums["policy_loss"])) == 8


def test_what_nothing_depends_on_is_told(programs):
    recipe, *_ = programs
    assert unread(recipe) == (set(), set())
    still = recipe.env._replace(step=lambda k, s, a, p: probes.walk().step(k, s, a, recipe.env_params))
    assert unread(recipe._replace(env=still)) == (set(), {"p_end", "p_cut"})


@pytest.mark.parametrize("tune_alpha", [True, False])
def test_a_knob_that_acts_on_a_fresh_agent_alone_is_not_idle(tune_alpha):
    """SAC's temperature starts at alpha where it is tuned; else it stays there, and no target is read."""
    env = probes.target()
    sizes = sac.Sizes(minibatches=1, batch_size=8, buffer_size=64, hidden=(4,), tune_alpha=tune_alpha)
    recipe = Recipe(agent_for(env, sac, sizes), env, sac.Knobs(), env.default_params(), 4, 2)
    assert unread(recipe) == (set() if tune_alpha else {"target_entropy"}, set())


def test_a_microbatch_changes_the_bytes_and_nothing_else():
    """Activations are held of 4,096 rows or of 64."""
    env = probes.walk()
    sizes = ppo.Sizes(num_envs=64, num_steps=64, epochs=1, minibatches=1, hidden=(32, 32))
    agent, layout = agent_for(env, ppo, sizes), lay_out(tuple(jax.devices()[:1]), 1, sizes.strata)
    shape = ppo.Knobs(), env.default_params(), sizes.num_envs, sizes.num_steps, sizes.minibatches
    needed, learned = [], []
    for microbatch in (4096, 64):
        recipe = Recipe(agent, env, *shape, microbatch)
        init, (chunk, size) = compile_init(recipe, layout), compile_chunk(recipe, layout)
        who = identities(0, 1, 10, 1)
        state, _ = chunk(init(who, stacked(shape[0], 1), stacked(shape[1], 1)), np.int32(2))
        needed.append(size)
        learned.append(jax.device_get(state.learner.params))
    assert needed[0] > 2 * needed[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *learned)


def test_a_microbatch_that_does_not_divide_the_rows_is_refused():
    env = probes.walk()
    agent = agent_for(env, ppo, TINY)
    recipe = Recipe(agent, env, ppo.Knobs(), env.default_params(), 4, 8, 2, microbatch=6)
    with pytest.raises(ShoalError, match="does not divide the 16 rows") as error:
        compile_chunk(recipe, lay_out(tuple(jax.devices()[:1]), 1, TINY.strata))
    assert error.value.hint == "--microbatch 4"
