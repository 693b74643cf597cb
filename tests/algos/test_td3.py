"""TD3 piece by piece: targets, losses, the delay, acting, devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest

import probes
from probes import lane
from shoal.algos import td3, update
from shoal.algos.td3 import Knobs, Params, Rows, Sizes
from shoal.errors import ShoalError
from shoal.nets import house_net
from shoal.ops.replay import Steps
from shoal.rollout import device
from shoal.types import WHOLE, Batch, Box, Discrete

ENV = probes.walk(continuous=True)
SMALL = Sizes(
    num_envs=4,
    num_steps=3,
    minibatches=6,
    delay=3,
    batch_size=8,
    buffer_size=24,
    learning_starts=14,
    hidden=(8,),
)
AGENT = probes.agent_for(ENV, td3, SMALL)
KNOBS = Knobs(gamma=0.9, tau=0.1, smoothing=0.5, smoothing_clip=0.9)
ROWS = 16
OBS, VECTOR = Box(-1, 1, (2,)), Box(-1, 1, (1,))
NET = house_net("auto", (8,), "relu")
ACTOR, CRITIC = NET(OBS, 1, 1.0), NET({"obs": OBS, "action": VECTOR}, 1, 1.0)


def grown():
    """A learner whose networks have opinions, and whose targets lag behind."""
    learner = jax.jit(AGENT.init)(jax.random.key(0), KNOBS)
    rng = np.random.default_rng(0)
    stir = lambda tree: jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), tree)
    return learner._replace(params=stir(learner.params), target=stir(learner.target))


def some_rows(turn=True, **changed):
    """Steps of all kinds: ended, cut short, both never."""
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=(ROWS, *shape)).astype(np.float32)
    kind = np.arange(ROWS) % 3
    steps = dict(
        obs=normal(2),
        action=np.tanh(normal(1)),
        reward=normal(),
        terminated=kind == 1,
        truncated=kind == 2,
        final_obs=normal(2),
    )
    weight, noise = np.ones(ROWS, np.float32), 3 * normal(1)
    return Rows(Steps(**steps | changed), weight, noise, np.bool_(turn))


@pytest.fixture(scope="module")
def grad():
    return jax.jit(AGENT.grad)


# --- Loss, as the paper writes it: one row, one critic at a time ------------------------------


def q(critics, which, obs, action):
    return CRITIC.apply(lane(critics, which), {"obs": obs[None], "action": action[None]})[0, 0]


def plain_target(learner, row):
    noise = jnp.clip(0.5 * row.noise, -0.9, 0.9)
    action = jnp.clip(
        jnp.tanh(ACTOR.apply(learner.target.actor, row.steps.final_obs[None])[0]) + noise, -1, 1
    )
    value = jnp.minimum(*(q(learner.target.critics, k, row.steps.final_obs, action) for k in (0, 1)))
    return row.steps.reward + 0.9 * jnp.where(row.steps.terminated, 0.0, value)


def plain_losses(learner, row):
    """Of the actor and of the critics."""
    obs, target = row.steps.obs, plain_target(learner, row)
    act = lambda actor: jnp.tanh(ACTOR.apply(actor, obs[None])[0])
    of_actor = lambda actor: -q(learner.params.critics, 0, obs, act(actor))
    of_critics = lambda critics: sum((q(critics, k, obs, row.steps.action) - target) ** 2 / 2 for k in (0, 1))
    return of_actor, of_critics


def test_gradient_and_metrics_are_those_of_the_papers_two_losses(grad):
    learner, rows = grown(), some_rows()

    def plain(steps, noise):
        losses = plain_losses(learner, Rows(steps, 1.0, noise, True))
        return [jax.value_and_grad(loss)(x) for loss, x in zip(losses, learner.params)]

    values, slopes = zip(*jax.jit(jax.vmap(plain))(rows.steps, rows.noise))
    numerator, count, outputs = grad(learner, (), rows)
    assert count == ROWS
    clipped = np.abs(0.5 * rows.noise) > 0.9
    assert 0 < clipped.sum() < ROWS
    close = lambda a, b: np.testing.assert_allclose(a, np.sum(b, 0), rtol=1e-4, atol=1e-3)
    jax.tree.map(close, numerator, Params(*slopes))
    close(outputs.metrics["policy_loss"] / SMALL.delay, values[0])
    close(outputs.metrics["critic_loss"], values[1])


def test_between_turns_the_actor_has_no_gradient_and_the_critics_the_same(grad):
    learner = grown()
    on, off = (grad(learner, (), some_rows(turn))[0] for turn in (True, False))
    assert all(np.all(x == 0) for x in jax.tree.leaves(off.actor))
    jax.tree.map(np.testing.assert_array_equal, on.critics, off.critics)


def test_a_step_bootstraps_through_truncation_and_not_through_termination():
    learner, never = grown(), np.zeros(ROWS, bool)
    target = jax.jit(partial(td3._target, ACTOR, CRITIC, learner))
    on = some_rows(terminated=never, truncated=never)
    np.testing.assert_array_equal(target(some_rows(terminated=~never)), on.steps.reward)
    np.testing.assert_array_equal(target(some_rows(terminated=never, truncated=~never)), target(on))
    assert np.all(np.abs(target(on) - on.steps.reward) > 1e-4)


def test_every_row_has_standard_normal_noise_of_its_own():
    sizes = Sizes(num_envs=4, num_steps=3, minibatches=2, batch_size=2000, buffer_size=24, hidden=(8,))
    agent, zero, never = probes.agent_for(ENV, td3, sizes), jnp.zeros((3, 4)), jnp.zeros((3, 4), bool)
    learner = agent.init(jax.random.key(0), KNOBS)
    learner = learner._replace(replay=device.spread(learner.replay, 4))
    obs, action = jnp.zeros((3, 4, 2)), jnp.zeros((3, 4, 1))
    columns = obs, None, action, zero, never, never, obs, {"vector": action}
    batch = Batch(*columns, carry=(), keys=(), key=jax.random.key(1), progress=0.0)
    noise = agent.prepare(learner, batch, WHOLE)[2].noise
    assert noise.shape == (2, 2000, 1)
    assert len(np.unique(noise)) > 3990
    assert kstest(np.ravel(noise), "norm").pvalue > 1e-3


# --- Step -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stepped():
    """The learner before and after one minibatch, on and off turn."""

    def step(learner, rows):
        numerator, count, outputs = AGENT.grad(learner, (), rows)
        return AGENT.apply(learner, jax.tree.map(lambda x: x / count, numerator), outputs)

    return lambda turn: (grown(), jax.jit(step)(grown(), some_rows(turn)))


def test_on_turn_targets_take_over_a_share_of_actor_and_critics(stepped):
    before, after = stepped(True)
    assert not np.array_equal(after.params.actor[0].weight, before.params.actor[0].weight)
    close = lambda new, old, aim: np.testing.assert_allclose(new, 0.9 * old + 0.1 * aim, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, after.target, before.target, after.params)


def test_off_turn_only_the_critics_move(stepped):
    before, after = stepped(False)
    same = partial(jax.tree.map, np.testing.assert_array_equal)
    same((after.params.actor, after.adam.actor), (before.params.actor, before.adam.actor))
    same(after.target, before.target)
    assert not np.array_equal(after.params.critics[0].weight, before.params.critics[0].weight)


@pytest.fixture(scope="module")
def history():
    """A population of two after 0 … 4 updates of 3 steps of 4 envs; the second explores more."""
    knobs = jax.tree.map(lambda x: jnp.full(2, x, jnp.float32), KNOBS._replace(lr=1e-2))
    knobs = knobs._replace(exploration=jnp.asarray([0.1, 0.5], jnp.float32))
    start = jax.tree.map(lambda x: jnp.concatenate([x, x]), probes.alone(ENV, td3, SMALL, KNOBS))
    states = [start._replace(learner=start.learner._replace(knobs=knobs))]
    step = jax.jit(jax.vmap(partial(update.update, AGENT, ENV, SMALL.num_steps)))
    for _ in range(4):
        states.append(step(states[-1])[0])
    return states


def test_the_actor_moves_with_every_third_of_the_critics_steps(history):
    """From the second update on: an update is 12 steps, and learning starts after 14."""
    for updates, state in enumerate(history):
        learned = max(0, updates - 1)
        assert state.learner.adam.critics.count.tolist() == 2 * [6 * learned]
        assert state.learner.adam.actor.count.tolist() == 2 * [2 * learned]


def test_under_vmap_the_turn_is_still_a_branch(history):
    """A branch on a batched value would run both sides every time."""
    step = jax.vmap(partial(update.update, AGENT, ENV, SMALL.num_steps))
    text = str(jax.make_jaxpr(step)(history[0]))
    assert text.count("cond[") >= 2  # the actor's gradient, and its step


# --- Acting -----------------------------------------------------------------------------------


def test_actions_are_uniform_at_first_and_noisy_later(history):
    noise = jax.random.normal(jax.random.key(0), (4000, 1))
    obs = np.ones((4000, 2), np.float32)
    act = jax.jit(lambda policy, noise: AGENT.act(policy, (), obs, None, noise)[1])
    at_first, later = (AGENT.policy(lane(history[i].learner, 1)) for i in (0, 4))
    assert np.abs(np.histogram(act(at_first, noise), 4, (0, 2))[0] - 1000).max() < 150  # five deviations
    mean = jnp.tanh(ACTOR.apply(later.actor, obs))
    np.testing.assert_allclose(act(later, None), 1 + mean, rtol=1e-5)
    np.testing.assert_allclose(
        act(later, noise), 1 + np.clip(mean + 0.5 * noise, -1, 1), rtol=1e-5, atol=1e-6
    )


def test_exploration_is_each_agents_own(history):
    seen = [np.asarray(state.learner.replay.action) for state in history]
    np.testing.assert_array_equal(seen[1][0], seen[1][1])  # random at first
    np.testing.assert_array_equal(seen[2][0], seen[2][1])
    assert np.abs(np.diff(seen[3][:, :, :3], axis=0)).max() > 0.05


def test_the_smallest_of_all_updates_has_no_nan():
    sizes = Sizes(
        num_envs=1,
        num_steps=1,
        minibatches=1,
        delay=1,
        batch_size=1,
        buffer_size=1,
        learning_starts=1,
        hidden=(4,),
    )
    state, metrics = probes.train(ENV, td3, sizes, Knobs(), 3, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.learner, metrics)))
    assert np.all(metrics["critic_loss"] > 0)


def test_two_devices_equal_one_in_float64_to_1e_9(history):
    start = jax.tree.map(lambda x: x[:1], history[2])
    with jax.enable_x64(True):
        wide = probes.wide(start)
        one, two = (probes.placed(ENV, td3, SMALL, wide, shards) for shards in (1, 2))
        moved = one[0].learner.params.actor[0].weight - wide.learner.params.actor[0].weight
        assert np.abs(moved).max() > 1e-2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, two)


# --- Sizes and spaces -------------------------------------------------------------------------


def test_minibatches_that_the_delay_does_not_divide_name_a_number_that_it_does():
    with pytest.raises(ShoalError, match="minibatches = 8 is not divisible by delay = 3") as error:
        Sizes(delay=3)
    assert "td3.minibatches 9" in error.value.hint


@pytest.mark.parametrize(
    "name", ["num_envs", "num_steps", "minibatches", "delay", "batch_size", "learning_starts"]
)
def test_sizes_below_1_are_refused(name):
    with pytest.raises(ShoalError, match=f"--td3.{name} 0 must be from 1"):
        Sizes(**{name: 0})


def test_discrete_actions_are_refused():
    with pytest.raises(ShoalError, match="td3 needs continuous actions"):
        td3.make(OBS, Discrete(3), SMALL, NET)
