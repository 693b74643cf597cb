"""DQN piece by piece: targets, loss, priorities, replay, the target network, devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from probes import lane
from shoal.algos import dqn, update
from shoal.algos.dqn import Knobs, Local, Rows, Sizes
from shoal.envs.breakout import make as breakout
from shoal.errors import ShoalError
from shoal.mesh.layout import lay_out
from shoal.nets import house_net
from shoal.ops.priorities import SMALLEST
from shoal.ops.replay import Index
from shoal.population.lanes import contained
from shoal.training.program import Recipe, compile_chunk
from shoal.types import WHOLE, Batch, Box, Discrete, MultiDiscrete

ENV = probes.walk()
SMALL = Sizes(
    num_envs=4,
    num_steps=3,
    minibatches=2,
    batch_size=8,
    buffer_size=32,
    learning_starts=14,
    target_every=20,
    n_step=2,
    prioritised=True,
    hidden=(8,),
)
ROWS, ACTIONS = 16, 3


def changed(**sizes):
    return Sizes(**{**vars(SMALL), **sizes})


def agent_of(**sizes):
    return probes.agent_for(ENV, dqn, changed(**sizes))


AGENT = agent_of()


def grown(agent=AGENT):
    """A learner whose network has opinions, and whose target network has others."""
    learner = jax.jit(agent.init)(jax.random.key(0), Knobs(gamma=0.9))
    rng = np.random.default_rng(0)
    stir = lambda tree: jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(np.float32), tree)
    return learner._replace(params=stir(learner.params), target=stir(learner.target))


def some_rows():
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=(ROWS, *shape)).astype(np.float32)
    mask = rng.random((ROWS, ACTIONS)) < 0.6
    mask[np.arange(ROWS), rng.integers(0, ACTIONS, ROWS)] = True
    return Rows(
        obs=normal(2),
        action=rng.integers(0, ACTIONS, ROWS).astype(np.int32),
        reward=normal(),
        discount=np.where(np.arange(ROWS) % 3, 0.81, 0.0).astype(np.float32),
        final_obs=normal(2),
        final_mask=mask,
        weight=rng.uniform(0.1, 1.0, ROWS).astype(np.float32),
        index=Index(np.arange(ROWS, dtype=np.int32) % 4, np.arange(ROWS, dtype=np.int32) // 2),
    )


def q_of(params, obs, dueling=False):
    net = house_net("auto", (8,), "relu")(Box(-1, 1, (2,)), ACTIONS + dueling, 1.0)
    out = net.apply(params, obs)
    return out[:, 3:] + out[:, :3] - out[:, :3].mean(1, keepdims=True) if dueling else out


# --- Loss -------------------------------------------------------------------------------------


def plain_targets(learner, rows, double, dueling):
    """Row by row, as the papers write them, over allowed actions only."""
    online, lagging = (q_of(tree, rows.final_obs, dueling) for tree in (learner.params, learner.target))
    targets = []
    for i in range(ROWS):
        allowed = [a for a in range(ACTIONS) if rows.final_mask[i, a]]
        chooser = online if double else lagging
        best = max(allowed, key=lambda a: chooser[i, a])
        targets.append(rows.reward[i] + rows.discount[i] * lagging[i, best])
    return np.array(targets)


@pytest.mark.parametrize(("double", "dueling"), [(True, False), (False, False), (True, True)])
def test_gradient_metrics_and_priorities_are_those_of_the_papers(double, dueling):
    agent, rows = agent_of(double=double, dueling=dueling), some_rows()
    learner = grown(agent)
    targets = plain_targets(learner, rows, double, dueling)
    other = plain_targets(learner, rows, not double, dueling)
    assert np.any(targets != other)  # the two do differ

    def plain(params):
        q = q_of(params, rows.obs, dueling)[np.arange(ROWS), rows.action]
        return jnp.sum(rows.weight * (q - targets) ** 2) / 2, q

    (loss, q), gradient = jax.value_and_grad(plain, has_aux=True)(learner.params)
    numerator, count, outputs = jax.jit(agent.grad)(learner, (), rows)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    assert count == ROWS
    jax.tree.map(close, numerator, gradient)
    close(outputs.metrics["value_loss"], loss)
    close(outputs.metrics["q_value"], q.sum())
    close(outputs.samples[1], (np.abs(q - targets) + SMALLEST) ** 0.6)


def test_any_split_of_a_minibatch_gives_its_gradient():
    learner, rows, grad = grown(), some_rows(), jax.jit(AGENT.grad)
    whole = grad(learner, (), rows)
    parts = [grad(learner, (), jax.tree.map(half, rows)) for half in (lambda x: x[:8], lambda x: x[8:])]
    close = lambda x, *y: np.testing.assert_allclose(x, sum(y), rtol=1e-4, atol=1e-4)
    jax.tree.map(close, (whole[0], whole[1], whole[2].metrics), *((a, b, c.metrics) for a, b, c in parts))


def test_new_priorities_are_written_where_the_rows_came_from():
    learner = grown()._replace(local=Local(jnp.zeros((4, 8))))
    numerator, _, outputs = jax.jit(AGENT.grad)(learner, (), some_rows())
    after = np.asarray(AGENT.apply(learner, numerator, outputs).local.priority)
    index, new = outputs.samples
    want = np.zeros((4, 8), np.float32)
    want[index.env, index.slot] = new
    np.testing.assert_array_equal(after, want)


# --- Acting -----------------------------------------------------------------------------------


def test_the_share_of_random_actions_falls_over_half_of_the_budget():
    learner = grown()._replace(knobs=Knobs(epsilon_start=0.8, epsilon_end=0.2, exploration=0.5))
    epsilons = [AGENT.policy(learner._replace(progress=jnp.float32(x))).epsilon for x in (0, 0.25, 0.5, 1)]
    np.testing.assert_allclose(epsilons, [0.8, 0.5, 0.2, 0.2], rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_actions_are_random_that_often_and_allowed_always(epsilon):
    """To five deviations."""
    number = 6000
    learner, obs = grown(), jnp.ones((number, 2))
    policy = AGENT.policy(learner)._replace(epsilon=jnp.float32(epsilon))
    best = int(jnp.argmax(q_of(learner.params, obs[:1])))
    mask = jnp.ones((number, 3), bool).at[:, (best + 1) % 3].set(False)
    noise = AGENT.noise(jax.random.key(0), number)
    act = jax.jit(lambda mask, noise: AGENT.act(policy, (), obs, mask, noise)[1])
    for given, others in ((mask, [0, 1]), (None, [1, 1])):
        share = epsilon / (1 + sum(others))
        seen = np.bincount((np.asarray(act(given, noise)) - best) % 3, minlength=3) / number
        want = np.array([1 - share * sum(others), share * others[0], share * others[1]])
        assert np.all(np.abs(seen - want) <= 5 * np.sqrt(want * (1 - want) / number) + 1e-9)
    forbidden = jnp.ones((number, 3), bool).at[:, best].set(False)
    second = int(jnp.argsort(q_of(learner.params, obs[:1])[0])[1])
    assert np.all(AGENT.act(policy, (), obs, forbidden, None)[1] == second)


# --- Over time --------------------------------------------------------------------------------

UPDATES = 8


@pytest.fixture(scope="module")
def step():
    return jax.jit(jax.vmap(contained(partial(update.update, AGENT, ENV, SMALL.num_steps))))


@pytest.fixture(scope="module")
def history(step):
    """An agent after 0 … 8 updates of 3 steps of 4 envs, and what it learned in each."""
    states, metrics = [probes.alone(ENV, dqn, SMALL, Knobs(lr=1e-2))], []
    for _ in range(UPDATES):
        state, learned = step(states[-1])
        states, metrics = [*states, state], [*metrics, learned]
    return states, metrics


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_nothing_is_learned_before_learning_starts(history):
    """14 steps are asked for and an update is 12: the second one learns."""
    states, metrics = history
    learners = [lane(state.learner, 0) for state in states]
    assert [learned["value_loss"].item() > 0 for learned in metrics] == [False] + [True] * (UPDATES - 1)
    assert [learner.written.item() for learner in learners] == list(range(0, 3 * UPDATES + 1, 3))
    same(learners[0].params, learners[1].params)
    assert learners[1].adam.count == 0
    assert learners[UPDATES].adam.count == 2 * (UPDATES - 1)


def test_the_target_network_is_copied_whenever_so_many_steps_have_passed(history):
    """Every 20 of 12 a time: due after updates 2 (24), 4 (48), 5 (60), 7 (84); in place for the one after."""
    learners = [lane(state.learner, 0) for state in history[0]]
    for i in range(1, UPDATES):
        due = 12 * i // 20 > 12 * (i - 1) // 20
        assert due == (i in (2, 4, 5, 7))
        same(learners[i + 1].target, learners[i].params if due else learners[i].target)
    assert not np.array_equal(learners[3].target[0].weight, learners[3].params[0].weight)


def test_every_step_in_the_replay_has_a_priority_and_no_other_slot_has(history):
    for i, state in enumerate(history[0]):
        priority, filled = state.learner.local.priority[0], min(3 * i, 8)
        assert priority.shape == (4, 8)
        assert np.all((np.asarray(priority) > 0) == (np.arange(8) < filled))


def drawn(history, progress=0.5, n_step=2):
    """A learner after steps 15, 16 and 17 of each env, which lie in slots 7, 0 and 1, and rows drawn then."""
    rng, shape = np.random.default_rng(0), (3, 4)
    columns = dict(
        obs=rng.normal(size=(*shape, 2)).astype(np.float32),
        action=rng.integers(0, 3, shape).astype(np.int32),
        reward=rng.normal(size=shape).astype(np.float32),
        terminated=np.zeros(shape, bool),
        truncated=np.zeros(shape, bool),
        final_obs=rng.normal(size=(*shape, 2)).astype(np.float32),
    )
    rest = dict(mask=None, extras={}, carry=(), keys=(), key=jax.random.key(3), progress=progress)
    learner = lane(history[0][5].learner, 0)._replace(knobs=Knobs(gamma=0.9, beta=0.3))
    learner = learner._replace(local=Local(jnp.asarray(rng.uniform(0.1, 2.0, (4, 8)), jnp.float32)))
    prepare = agent_of(n_step=n_step).prepare
    after, _, rows = jax.jit(lambda *given: prepare(*given, WHOLE))(learner, Batch(**columns, **rest))
    assert after.written == 18
    return after, rows


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_weights_undo_the_priorities_by_an_exponent_that_rises_to_1(history, progress):
    """Schaul et al., section 3.4; every env has an equal share of a minibatch."""
    learner, rows = drawn(history, progress)
    priority = np.asarray(learner.local.priority, np.float64)
    chance = priority / priority.sum(1, keepdims=True) / 4
    raw = (32 * chance[rows.index.env, rows.index.slot]) ** -(0.3 + 0.7 * progress)
    np.testing.assert_allclose(rows.weight, raw / raw.max(1, keepdims=True), rtol=1e-4)


@pytest.mark.parametrize("n_step", [1, 2, 3])
def test_rows_hold_returns_of_up_to_n_steps(history, n_step):
    """Added up step by step, to an end or to the newest step."""
    learner, rows = drawn(history, n_step=n_step)
    ring, numbers = learner.replay, set()
    for row in np.ndindex(rows.reward.shape):
        env, slot, number, reward = rows.index.env[row], rows.index.slot[row], 0, 0.0
        for step in range(10 + (slot - 2) % 8, 18):
            last = env, step % 8
            reward += 0.9**number * ring.reward[last]
            number += 1
            if number == n_step or ring.terminated[last] or ring.truncated[last]:
                break
        discount = 0.0 if ring.terminated[last] else 0.9**number
        np.testing.assert_allclose(rows.reward[row], reward, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rows.discount[row], discount, rtol=1e-6)
        np.testing.assert_array_equal(rows.final_obs[row], ring.final_obs[last])
        numbers.add(number)
    assert numbers == set(range(1, n_step + 1))


def test_a_masked_lane_stands_still_and_goes_on_as_if_it_had_not(history, step):
    """Its next steps are written into the replay all the same, and must change nothing."""
    states, _ = history
    state = states[5]
    halted = state._replace(identity=state.identity._replace(active=jnp.asarray([False])))
    after, _ = step(step(halted)[0])
    same(
        after._replace(learner=after.learner._replace(replay=())),
        halted._replace(learner=halted.learner._replace(replay=())),
    )
    resumed = after._replace(identity=after.identity._replace(active=jnp.asarray([True])))
    same(step(resumed)[0], states[6])


@pytest.mark.parametrize("sizes", [{}, {"prioritised": False, "dueling": True, "n_step": 1}])
def test_two_devices_equal_one_in_float64_to_1e_9(history, sizes):
    sizes = changed(**sizes)
    start = probes.alone(ENV, dqn, sizes, Knobs(lr=1e-2)) if sizes != SMALL else history[0][4]
    with jax.enable_x64(True):
        wide = probes.wide(start)
        one, two = (probes.placed(ENV, dqn, sizes, wide, shards, 4) for shards in (1, 2))
        moved = one[0].learner.params[0].weight - wide.learner.params[0].weight
        assert np.abs(moved).max() > 1e-2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, two)


def test_more_steps_than_are_kept_make_no_return():
    with pytest.raises(ShoalError, match="n_step = 9 is more than the 8 steps kept per env"):
        changed(n_step=9)


def test_the_smallest_of_all_updates_has_no_nan():
    one = dict.fromkeys(("num_envs", "num_steps", "minibatches", "batch_size", "buffer_size"), 1)
    sizes = changed(**one, learning_starts=1, target_every=1, n_step=1)
    state, metrics = probes.train(ENV, dqn, sizes, Knobs(), 3, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.learner, metrics)))
    assert np.all(metrics["value_loss"] > 0)


# --- Memory -----------------------------------------------------------------------------------


def test_images_are_kept_as_they_come():
    env, sizes = breakout(), Sizes(num_envs=2, buffer_size=1000)
    ring = jax.eval_shape(probes.agent_for(env, dqn, sizes).init, jax.random.key(0), Knobs()).replay
    assert (ring.obs.shape, ring.obs.dtype) == ((500, 10, 10, 4), bool)
    per_step = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(ring)) / 500
    assert per_step == 2 * 400 + 4 + 4 + 1 + 1 + 3  # two images, action, reward, both ends, mask


def test_no_update_copies_the_replay():
    """What a program needs beyond its state must not grow with the replay, not even for a lone agent."""
    held, beyond = [], []
    for buffer in (1000, 21_000):
        sizes = Sizes(num_envs=2, batch_size=4, buffer_size=buffer, hidden=(4,))
        agent = probes.agent_for(ENV, dqn, sizes)
        recipe = Recipe(agent, ENV, Knobs(), ENV.default_params(), sizes.num_envs, sizes.num_steps)
        compiled, _ = compile_chunk(recipe, lay_out(tuple(jax.devices()[:1]), 1, sizes.strata))
        memory = compiled.memory_analysis()
        held.append(memory.argument_size_in_bytes)
        beyond.append(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
    assert held[1] - held[0] == 20_000 * (2 * 8 + 4 + 4 + 1 + 1 + 3)
    assert beyond[1] - beyond[0] < 0.01 * (held[1] - held[0])


# --- Sizes and spaces -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["num_envs", "num_steps", "minibatches", "batch_size", "learning_starts", "target_every", "n_step"],
)
def test_sizes_below_1_are_refused(name):
    with pytest.raises(ShoalError, match=f"--dqn.{name} 0 must be from 1"):
        Sizes(**{name: 0})


def test_a_buffer_that_does_not_fit_names_one_that_would():
    with pytest.raises(ShoalError, match="not divisible") as error:
        Sizes(num_envs=3, buffer_size=100)
    assert "102" in error.value.hint


@pytest.mark.parametrize("space", [Box(-1, 1, (2,)), MultiDiscrete((2, 3)), {"a": Discrete(2)}])
def test_actions_that_are_not_discrete_are_refused(space):
    with pytest.raises(ShoalError, match="dqn needs discrete actions, not"):
        dqn.make(Box(-1, 1, (2,)), space, SMALL, house_net("auto", (8,), "relu"))


def test_unknown_first_weights_name_the_nearest():
    with pytest.raises(ShoalError, match="no init is called 'lecum'") as error:
        Sizes(init="lecum")
    assert "did you mean lecun? use orthogonal, lecun" in error.value.hint
