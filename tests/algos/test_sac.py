"""SAC piece by piece: targets, losses, temperature, replay, devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from probes import lane
from shoal.algos import sac, update
from shoal.algos.sac import Knobs, Rows, Sizes
from shoal.envs import spaces
from shoal.errors import ShoalError
from shoal.nets import house_net
from shoal.ops.replay import Steps
from shoal.ops.squashed import LOG_STD
from shoal.types import Box, Discrete

ENV = probes.walk(continuous=True)
SMALL = Sizes(
    num_envs=4, num_steps=3, minibatches=2, batch_size=8, buffer_size=24, learning_starts=14, hidden=(8,)
)
AGENT = probes.agent_for(ENV, sac, SMALL)
ROWS = 16


def grown():
    """A learner whose networks have opinions, and whose targets are not its critics."""
    learner = jax.jit(AGENT.init)(jax.random.key(0), Knobs(gamma=0.9, tau=0.1, alpha=0.3))
    rng = np.random.default_rng(0)
    stir = lambda tree: jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), tree)
    params = learner.params._replace(actor=stir(learner.params.actor), critics=stir(learner.params.critics))
    return learner._replace(params=params, target=stir(learner.target))


def some_rows(number=ROWS, **changed):
    """Steps of all kinds: ended, cut short, both never."""
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=(number, *shape)).astype(np.float32)
    kind = np.arange(number) % 3
    steps = dict(
        obs=normal(2),
        action=np.tanh(normal(1)),
        reward=normal(),
        terminated=kind == 1,
        truncated=kind == 2,
        final_obs=normal(2),
    )
    return Rows(Steps(**steps | changed), np.ones(number, np.float32), normal(2))


@pytest.fixture(scope="module")
def grad():
    return jax.jit(AGENT.grad)


# --- Loss, as the paper writes it: one network, one row, one term at a time --------------------

OBS, VECTOR = Box(-1, 1, (2,)), Box(-1, 1, (1,))
CRITIC = house_net("auto", (8,), "relu")({"obs": OBS, "action": VECTOR}, 1, 1.0)
ACTOR = house_net("auto", (8,), "relu")(OBS, 2, 1.0)


def q(critics, which, obs, action):
    return CRITIC.apply(lane(critics, which), {"obs": obs[None], "action": action[None]})[0, 0]


def draw(actor, obs, noise):
    """Action and log density by the plain change of variables."""
    mean, spread = ACTOR.apply(actor, obs[None])[0]
    std = jnp.exp(LOG_STD[0] + (LOG_STD[1] - LOG_STD[0]) * (jnp.tanh(spread) + 1) / 2)
    action = jnp.tanh(mean + std * noise)
    return action[None], jax.scipy.stats.norm.logpdf(noise) - jnp.log(std) - jnp.log(1 - action**2)


def plain_target(learner, row):
    steps, noise = row.steps, row.noise
    action, log_prob = draw(learner.params.actor, steps.final_obs, noise[0])
    value = jnp.minimum(*(q(learner.target, k, steps.final_obs, action) for k in (0, 1)))
    soft = value - jnp.exp(learner.params.log_alpha) * log_prob
    return steps.reward + jnp.where(steps.terminated, 0.0, 0.9 * soft)


def plain_losses(learner, row):
    """Of actor, critics and temperature, each a function of its own parameters."""
    obs, action, alpha = row.steps.obs, row.steps.action, jnp.exp(learner.params.log_alpha)
    target = plain_target(learner, row)

    def of_actor(actor):
        action, log_prob = draw(actor, obs, row.noise[1])
        value = jnp.minimum(*(q(learner.params.critics, k, obs, action) for k in (0, 1)))
        return alpha * log_prob - value

    def of_critics(critics):
        return sum((q(critics, k, obs, action) - target) ** 2 / 2 for k in (0, 1))

    _, log_prob = draw(learner.params.actor, obs, row.noise[1])
    return of_actor, of_critics, lambda log_alpha: -jnp.exp(log_alpha) * (log_prob - 1.0)


def test_gradient_and_metrics_are_those_of_the_papers_three_losses(grad):
    learner, rows = grown(), some_rows()

    def plain(row):
        return [jax.value_and_grad(loss)(x) for loss, x in zip(plain_losses(learner, row), learner.params)]

    values, slopes = zip(*jax.jit(jax.vmap(plain))(rows))
    numerator, count, outputs = grad(learner, (), rows)
    assert count == ROWS
    close = lambda a, b: np.testing.assert_allclose(a, np.sum(b, 0), rtol=1e-4, atol=1e-3)
    jax.tree.map(close, tuple(numerator), slopes)
    close(outputs.metrics["policy_loss"], values[0])
    close(outputs.metrics["critic_loss"], values[1])
    np.testing.assert_allclose(outputs.metrics["alpha"], ROWS * 0.3, rtol=1e-5)


def test_any_split_of_a_minibatch_gives_its_gradient(grad):
    learner, rows = grown(), some_rows()
    whole = grad(learner, (), rows)
    parts = [grad(learner, (), jax.tree.map(half, rows)) for half in (lambda x: x[:8], lambda x: x[8:])]
    close = lambda x, *y: np.testing.assert_allclose(x, sum(y), rtol=1e-4, atol=1e-4)
    jax.tree.map(close, whole, *parts)


def test_a_step_bootstraps_through_truncation_and_not_through_termination():
    learner, never = grown(), np.zeros(ROWS, bool)
    target = jax.jit(partial(sac._target, ACTOR, CRITIC, SMALL, learner))
    plain = jax.jit(jax.vmap(partial(plain_target, learner)))
    on = some_rows(terminated=never, truncated=never)
    np.testing.assert_array_equal(target(some_rows(terminated=~never)), on.steps.reward)
    np.testing.assert_array_equal(target(some_rows(terminated=never, truncated=~never)), target(on))
    np.testing.assert_allclose(target(on), plain(on), rtol=1e-4, atol=1e-4)


# --- Step -------------------------------------------------------------------------------------


def stepped(learner, agent=AGENT):
    """After one minibatch."""
    rows = some_rows()
    numerator, count, outputs = agent.grad(learner, (), rows)
    return agent.apply(learner, jax.tree.map(lambda x: x / count, numerator), outputs)


def test_targets_take_over_a_share_of_the_new_critics():
    learner = grown()
    after = jax.jit(stepped)(learner)
    assert not np.array_equal(after.params.critics[0].weight, learner.params.critics[0].weight)
    close = lambda new, old, aim: np.testing.assert_allclose(new, 0.9 * old + 0.1 * aim, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, after.target, learner.target, after.params.critics)


@pytest.mark.parametrize(("target", "falls"), [(-50.0, True), (0.69, False)])
def test_the_temperature_falls_where_entropy_is_above_its_target_and_rises_below(target, falls):
    learner = grown()
    learner = learner._replace(knobs=learner.knobs._replace(target_entropy=target))
    move = jax.jit(stepped)(learner).params.log_alpha - learner.params.log_alpha
    np.testing.assert_allclose(move, -3e-4 if falls else 3e-4, rtol=1e-2)  # Adam's first step is its rate


def test_a_fixed_temperature_is_the_knobs():
    agent = probes.agent_for(ENV, sac, Sizes(**{**vars(SMALL), "tune_alpha": False}))
    learner = grown()
    learner = learner._replace(knobs=learner.knobs._replace(alpha=0.7))  # as another's knobs would be
    after = jax.jit(partial(stepped, agent=agent))(learner)
    assert after.params.log_alpha == learner.params.log_alpha
    metrics = jax.jit(agent.grad)(learner, (), some_rows())[2].metrics
    np.testing.assert_allclose(metrics["alpha"], ROWS * 0.7, rtol=1e-6)


# --- Acting and replay ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def history():
    """An agent after 0 … 6 updates of 3 steps of 4 envs, and what it learned in each."""
    step = jax.jit(jax.vmap(partial(update.update, AGENT, ENV, SMALL.num_steps)))
    states, metrics = [probes.alone(ENV, sac, SMALL, Knobs(lr=1e-2))], []
    for _ in range(6):
        state, learned = step(states[-1])
        states, metrics = [*states, state], [*metrics, learned]
    return [lane(state, 0) for state in states], metrics


def test_nothing_is_learned_before_learning_starts(history):
    """14 steps are asked for and an update is 12: the second one learns."""
    states, metrics = history
    assert SMALL.random_steps == 4
    assert [learned["critic_loss"].item() > 0 for learned in metrics] == [False] + [True] * 5
    assert [learned["alpha"].item() > 0 for learned in metrics] == [False] + [True] * 5
    assert [AGENT.policy(state.learner).random.item() for state in states] == [True] * 2 + [False] * 5
    assert [state.learner.written.item() for state in states] == list(range(0, 21, 3))
    jax.tree.map(np.testing.assert_array_equal, *(state.learner.params for state in states[:2]))


def test_actions_are_uniform_at_first_and_the_policys_later():
    learner, obs = grown(), np.ones((4000, 2), np.float32)
    noise = jax.random.normal(jax.random.key(0), (4000, 1))
    act = jax.jit(lambda policy, noise: AGENT.act(policy, (), obs, None, noise)[1:])
    policy = AGENT.policy(learner)
    action, extras = act(policy, noise)
    assert policy.random
    assert np.abs(np.histogram(action, 4, (0, 2))[0] - 1000).max() < 150  # five deviations
    np.testing.assert_allclose(action, 1 + extras["vector"], rtol=1e-6)
    action, extras = act(policy._replace(random=jnp.bool_(False)), noise)
    want, _ = jax.vmap(partial(draw, learner.params.actor, obs[0]))(noise[:, 0])
    np.testing.assert_allclose(extras["vector"], want, atol=1e-5)
    greedy, _ = act(policy, None)
    np.testing.assert_allclose(
        greedy[0], 1 + np.tanh(ACTOR.apply(learner.params.actor, obs)[0, :1]), rtol=1e-5
    )


def test_the_replay_holds_what_happened(history):
    """Two rollouts fill the ring of 6 steps per env; the third takes the first one's place."""
    states, _ = history
    rings = [state.learner.replay for state in states]
    assert rings[0].reward.shape == (4, 6)
    for before, after, slots in zip(rings, rings[1:], 3 * [slice(0, 3), slice(3, 6)]):
        kept = slice(3, 6) if slots.start == 0 else slice(0, 3)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:, kept], y[:, kept]), before, after)  # noqa: B023
        steps = jax.tree.map(lambda x: x[:, slots], after)  # noqa: B023
        x, pay = steps.obs[..., 0], steps.reward
        np.testing.assert_allclose(
            pay, steps.final_obs[..., 0] + 1 + steps.action[..., 0], rtol=1e-4, atol=1e-5
        )
        over = (steps.terminated | steps.truncated)[:, :-1]
        assert np.array_equal(over, x[:, 1:] != steps.final_obs[:, :-1, 0])
    assert np.abs(rings[-1].action).max() <= 1


def test_a_masked_lane_writes_the_same_steps_each_time(history):
    """Freezing keeps all but the replay, and its next update must find it as it was."""
    states, _ = history
    step = jax.jit(partial(update.update, AGENT, ENV, SMALL.num_steps))
    once, _ = step(states[3])
    frozen = states[3]._replace(learner=states[3].learner._replace(replay=once.learner.replay))
    jax.tree.map(np.testing.assert_array_equal, step(frozen)[0], once)


def test_the_smallest_of_all_updates_has_no_nan():
    sizes = Sizes(
        num_envs=1,
        num_steps=1,
        minibatches=1,
        batch_size=1,
        buffer_size=1,
        learning_starts=1,
        hidden=(4,),
    )
    state, metrics = probes.train(ENV, sac, sizes, Knobs(), 3, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.learner, metrics)))
    assert np.all(metrics["critic_loss"] > 0)


def test_two_devices_equal_one_in_float64_to_1e_9(history):
    """Same rows, same noise, same sums, wherever the envs are."""
    states, _ = history
    start = jax.tree.map(lambda x: x[None], states[2])
    with jax.enable_x64(True):
        wide = probes.wide(start)
        one, two = (probes.placed(ENV, sac, SMALL, wide, shards) for shards in (1, 2))
        moved = one[0].learner.params.critics[0].weight - wide.learner.params.critics[0].weight
        assert np.abs(moved).max() > 1e-2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, two)


# --- Sizes and spaces -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_envs", "num_steps", "minibatches", "batch_size", "learning_starts"])
def test_sizes_below_1_are_refused(name):
    with pytest.raises(ShoalError, match=f"--sac.{name} 0 must be from 1"):
        Sizes(**{name: 0})


def test_a_buffer_that_does_not_fit_names_one_that_would():
    with pytest.raises(ShoalError, match="not divisible") as error:
        Sizes(num_envs=3, buffer_size=100)
    assert "102" in error.value.hint


def test_discrete_actions_are_refused():
    with pytest.raises(ShoalError, match="sac needs continuous actions"):
        sac.make(Box(-1, 1, (2,)), Discrete(3), SMALL, house_net("auto", (8,), "relu"))


def test_actions_may_be_a_tree_of_boxes_in_any_unit():
    space = {"arm": Box(0.0, 4.0, (2,)), "leg": Box(-1000.0, 1000.0, ())}
    agent = sac.make(OBS, space, SMALL, house_net("auto", (8,), "relu"))

    def act(key):
        policy = agent.policy(agent.init(key, Knobs()))
        return agent.act(policy, (), jnp.zeros((5, 2)), None, agent.noise(key, 5))[1:]

    action, extras = jax.jit(act)(jax.random.key(0))
    assert extras["vector"].shape == (5, 3)
    assert all(spaces.contains(space, lane(action, i)) for i in range(5))
    assert np.ptp(action["leg"]) > 100
