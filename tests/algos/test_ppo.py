"""PPO piece by piece: targets, minibatches, loss, step; each against the obvious version."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from probes import TINY, lane, tiny
from shoal.algos import ppo
from shoal.algos.ppo import Knobs, Learner, Local, Sizes
from shoal.errors import ShoalError
from shoal.nets import house_net
from shoal.ops.statistics import Moments, no_moments
from shoal.rollout import device
from shoal.types import WHOLE, Batch

ENV = probes.walk()


def rollout(state, number):
    """A Batch of one agent, and its envs afterwards."""
    keys = device.rollout_keys(jnp.uint32(0), jnp.int32(0), jnp.int32(number), jnp.arange(TINY.num_envs))
    policy = tiny().agent.policy(state.learner)
    actors, columns, _ = device.collect(
        tiny().agent, ENV, policy, state.actors, state.env_params, keys, TINY.num_steps
    )
    key = jax.random.key(number)
    return actors, Batch(**columns, carry=(), keys=keys, key=key, progress=jnp.float32(0.25))


@pytest.fixture(scope="module")
def prepared():
    """Learner, batch, data and rows of a second rollout, whose statistics are those of the first."""

    def run(state):
        actors, batch = rollout(state, 0)
        learner, _, _ = tiny().agent.prepare(state.learner, batch, WHOLE)
        state = state._replace(learner=learner, actors=actors)
        _, batch = rollout(state, 1)
        return learner, batch, *tiny().agent.prepare(learner, batch, WHOLE)

    state = lane(probes.start(probes.knobs()), 0)
    # A fresh policy hardly looks at its observation; this one does.
    return jax.jit(run)(state._replace(learner=moved(state.learner, 1.0)))


@pytest.fixture(scope="module")
def grad():
    return jax.jit(tiny().agent.grad)


def moved(learner, by=0.3):
    """The learner after some steps: ratios and values are no longer those of the rollout."""
    leaves, tree = jax.tree.flatten(learner.params)
    rng = np.random.default_rng(0)
    leaves = [x + by * jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves]
    return learner._replace(params=jax.tree.unflatten(tree, leaves))


# --- Loss -------------------------------------------------------------------------------------


def test_the_first_ratio_is_1_although_the_statistics_have_moved_on(prepared, grad):
    """Rollout and loss see observations through the same moments, and masks, and samples."""
    before, _, learner, data, rows = prepared
    assert not np.allclose(before.obs_moments.mean[0], learner.obs_moments.mean[0])
    for i in range(TINY.epochs * TINY.minibatches):
        _, count, outputs = grad(learner, data, lane(rows, i))
        assert outputs.metrics["clip_fraction"] == 0
        assert abs(outputs.metrics["approx_kl"] / count) < 1e-6


def plain_loss(params, learner, data, rows, clip_value):
    """Mean over the minibatch, as the paper and its most read implementation write it."""
    actor, critic = (house_net("auto", TINY.hidden, "tanh")(ENV.obs_space(()), n, 1.0) for n in (3, 1))
    knobs, index = learner.knobs, rows.index
    obs, target, old = data.obs[index], data.target[index], data.value[index]
    logits = jnp.where(data.mask[index], actor.apply(params.actor, obs), -jnp.inf)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, data.sample[index][:, None], 1)[:, 0]
    ratio = jnp.exp(log_prob - data.log_prob[index])
    clipped = jnp.clip(ratio, 1 - knobs.clip, 1 + knobs.clip)
    policy_loss = jnp.mean(jnp.maximum(-rows.advantage * ratio, -rows.advantage * clipped))
    value = critic.apply(params.critic, obs)[:, 0]
    error = (value - target) ** 2
    if clip_value:
        near = old + jnp.clip(value - old, -knobs.clip, knobs.clip)
        error = jnp.maximum(error, (near - target) ** 2)
    value_loss = 0.5 * jnp.mean(error)
    safe = jnp.where(data.mask[index], log_probs, 0.0)
    entropy = jnp.mean(-jnp.sum(jnp.exp(safe) * safe * data.mask[index], -1))
    total = policy_loss - knobs.ent_coef * entropy + knobs.vf_coef * value_loss
    return total, dict(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)


@pytest.mark.parametrize("clip_value", [True, False])
def test_gradient_and_metrics_equal_the_plain_loss(prepared, clip_value):
    _, _, learner, data, rows = prepared
    sizes = Sizes(**{**vars(TINY), "clip_value": clip_value})
    learner, rows = moved(learner), lane(rows, 1)
    slope = jax.jit(jax.grad(plain_loss, has_aux=True), static_argnums=4)
    gradient, metrics = slope(learner.params, learner, data, rows, clip_value)
    numerator, count, outputs = jax.jit(probes.agent_for(ENV, ppo, sizes).grad)(learner, data, rows)
    assert count == TINY.num_envs * TINY.num_steps // TINY.minibatches
    close = lambda a, b: np.testing.assert_allclose(a / count, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, numerator, gradient)
    for name, value in metrics.items():
        close(outputs.metrics[name], value)
    assert outputs.metrics["approx_kl"] > 0
    assert 0 < outputs.metrics["clip_fraction"] < count


def test_any_split_of_a_minibatch_gives_its_gradient(prepared):
    _, _, learner, data, rows = prepared
    learner, rows = moved(learner), lane(rows, 0)
    grad, number = jax.jit(tiny().agent.grad), len(rows.index)
    whole = grad(learner, data, rows)
    for cuts in ([number // 2], [1]):
        edges = zip([0, *cuts], [*cuts, number])
        parts = [grad(learner, data, jax.tree.map(lambda x: x[a:b], rows)) for a, b in edges]  # noqa: B023
        total = jax.tree.map(lambda *x: sum(x), *parts)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        jax.tree.map(close, total, whole)


# --- Targets ----------------------------------------------------------------------------------


def test_targets_are_advantages_plus_values_of_what_the_rollout_saw(prepared):
    learner, batch, after, data, _ = prepared
    _, _, moments = ppo.scaled_reward(TINY, learner, batch, WHOLE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), moments, after.return_moments)
    np.testing.assert_array_equal(data.sample, np.asarray(batch.action).reshape(-1))
    assert after.progress == 0.25
    seen = ppo.seen(TINY, learner.obs_moments, batch.obs).reshape(-1, 2)
    np.testing.assert_allclose(data.obs, seen, rtol=1e-4, atol=1e-5)


def test_statistics_are_of_raw_observations_of_every_rollout(prepared):
    """Fed with what they have normalised themselves, they would creep towards 0 and 1."""
    before, batch, after, _, _ = prepared
    number = TINY.num_envs * TINY.num_steps
    assert (before.obs_moments.count, after.obs_moments.count) == (number, 2 * number)
    want = (before.obs_moments.mean[0] + np.mean(batch.obs, (0, 1))) / 2
    np.testing.assert_allclose(after.obs_moments.mean[0], want, rtol=1e-4, atol=1e-5)


class Rewards(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(1)

    def __init__(self, rewards):
        self.rewards = iter(rewards)

    def reset(self, **_):
        return 0, {}

    def step(self, action):
        return 0, next(self.rewards), False, False, {}


def test_normalised_rewards_equal_gymnasiums_after_the_statistics_have_settled():
    """Gymnasium updates its statistics step by step, here they are of whole rollouts: equal at the end."""
    rng = np.random.default_rng(0)
    rewards = rng.normal(1.0, 3.0, size=(40, 64)).astype(np.float32)
    theirs = gymnasium.wrappers.NormalizeReward(Rewards(rewards.ravel().tolist()), gamma=0.9)
    theirs.reset()
    want = np.array([theirs.step(0)[1] for _ in range(rewards.size)])
    learner, sizes = bare_learner(), Sizes(num_envs=1, num_steps=64, normalize_reward=True)
    scale = jax.jit(lambda learner, batch: ppo.scaled_reward(sizes, learner, batch, WHOLE))
    for chunk in rewards:
        got, local, moments = scale(learner, bare_batch(chunk[:, None]))
        learner = learner._replace(local=local, return_moments=moments)
    np.testing.assert_allclose(got[:, 0], want[-64:], rtol=5e-3)
    np.testing.assert_allclose(moments.m2[0] / moments.count, theirs.return_rms.var, rtol=1e-3)


def test_discounted_returns_restart_with_each_episode_and_carry_over_rollouts():
    sizes = Sizes(num_envs=1, num_steps=4, minibatches=1, normalize_reward=True)
    batch = bare_batch(np.ones((4, 1), np.float32), ended=[False, True, False, False])
    _, local, moments = ppo.scaled_reward(sizes, bare_learner(), batch, WHOLE)
    np.testing.assert_allclose(local.discounted_return, [1.9], rtol=1e-6)
    np.testing.assert_allclose(moments.mean[0], np.mean([1, 1.9, 1, 1.9]), rtol=1e-6)


def test_a_reward_far_out_is_cut_at_ten_deviations():
    """Huang et al. 2022, continuous actions, detail 9. Episodes of one step: returns are rewards."""
    rewards = np.full((1000, 1), 0.01, np.float32)
    rewards[[3, 70], 0] = 1.0, -1.0
    sizes = Sizes(num_envs=1, num_steps=1000, normalize_reward=True)
    scale = jax.jit(lambda batch: ppo.scaled_reward(sizes, bare_learner(), batch, WHOLE)[0][:, 0])
    got = np.asarray(scale(bare_batch(rewards, ended=np.ones(1000, bool))))
    assert got[[3, 70]].tolist() == [10, -10]
    np.testing.assert_allclose(np.delete(got, [3, 70]), 0.01 / rewards.std(), rtol=1e-4)


def bare_learner():
    knobs = Knobs()._replace(gamma=jnp.float32(0.9))
    zero = no_moments(jnp.zeros(()))
    return Learner(knobs, (), (), jnp.float32(0), zero, zero, Local(jnp.zeros(1)))


def bare_batch(reward, ended=None):
    ended = jnp.zeros(reward.shape, bool) if ended is None else jnp.asarray(ended)[:, None]
    never = jnp.zeros(reward.shape, bool)
    return Batch((), None, (), jnp.asarray(reward), ended, never, (), {}, (), None, None, None)


# --- Minibatches ------------------------------------------------------------------------------


def shuffled(sizes, advantage, axis=WHOLE):
    return jax.jit(lambda a, key: ppo._shuffled(sizes, a, key, axis))(advantage, jax.random.key(0))


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(num_envs=4, num_steps=8, epochs=3, minibatches=4),
        Sizes(num_envs=6, num_steps=5, epochs=2, minibatches=3),
        Sizes(num_envs=1, num_steps=7, epochs=1, minibatches=7),
        Sizes(num_envs=16, num_steps=3, epochs=2, minibatches=1),
    ],
)
def test_every_epoch_uses_every_row_once_and_every_stratum_equally(sizes):
    rows = sizes.num_envs * sizes.num_steps
    index = np.asarray(shuffled(sizes, jnp.arange(rows, dtype=jnp.float32)).index)
    assert index.shape == (sizes.epochs * sizes.minibatches, rows // sizes.minibatches)
    epochs = index.reshape(sizes.epochs, -1)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(rows))
    if sizes.epochs > 1 and rows > 8:
        assert not np.array_equal(epochs[0], epochs[1])
    stratum = index % sizes.num_envs // (sizes.num_envs // sizes.strata)
    for minibatch in stratum:
        assert len(set(np.bincount(minibatch, minlength=sizes.strata))) == 1


def test_shares_of_the_data_axis_hold_the_same_minibatches():
    """Row by row: time and global env of each minibatch's members, on one share or on two."""
    sizes = Sizes(num_envs=8, num_steps=6, epochs=2, minibatches=3, normalize_advantage=False)
    members = lambda index, envs, first: {(i // envs, first + i % envs) for i in index.tolist()}
    whole = shuffled(sizes, jnp.zeros(48)).index
    shares = [shuffled(sizes, jnp.zeros(24), WHOLE._replace(index=i, size=2)).index for i in range(2)]
    for i in range(len(whole)):
        parts = [members(share[i], 4, 4 * s) for s, share in enumerate(shares)]
        assert not parts[0] & parts[1]
        assert parts[0] | parts[1] == members(whole[i], 8, 0)


def test_advantages_are_normalised_over_each_minibatch():
    sizes = Sizes(num_envs=4, num_steps=8, epochs=1, minibatches=4)
    advantage = jnp.asarray(np.random.default_rng(0).normal(5.0, 3.0, 32), jnp.float32)
    rows = shuffled(sizes, advantage)
    np.testing.assert_allclose(np.mean(rows.advantage, 1), 0, atol=1e-5)
    np.testing.assert_allclose(np.std(rows.advantage, 1, ddof=1), 1, rtol=1e-4)
    raw = shuffled(
        Sizes(num_envs=4, num_steps=8, epochs=1, minibatches=4, normalize_advantage=False), advantage
    )
    np.testing.assert_array_equal(raw.advantage, np.asarray(advantage)[np.asarray(raw.index)])


@pytest.mark.parametrize("minibatches", [1, 8])
def test_a_constant_advantage_or_a_minibatch_of_one_becomes_0(minibatches):
    sizes = Sizes(num_envs=2, num_steps=4, epochs=1, minibatches=minibatches)
    np.testing.assert_allclose(shuffled(sizes, jnp.full(8, 3.0)).advantage, 0, atol=1e-5)


def test_the_smallest_of_all_updates_has_no_nan():
    """One env, one step, one row: a single finished episode, a minibatch of one, no spread of anything."""
    sizes = Sizes(
        num_envs=1,
        num_steps=1,
        epochs=1,
        minibatches=1,
        hidden=(4,),
        normalize_obs=True,
        normalize_reward=True,
    )
    state, metrics = probes.train(probes.ladder(), ppo, sizes, Knobs(), 3, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.learner, metrics)))
    assert metrics["episodes"].tolist() == [[1.0]] * 3
    assert metrics["return_sum"].tolist() == [[1.0]] * 3


# --- Step -------------------------------------------------------------------------------------


def stepped(sizes, knobs, progress, size=1.0):
    """The learner after one optimiser step on a gradient of this norm, starting from 0."""
    params = {"w": jnp.zeros(4)}
    moments = Moments(jnp.float32(0), (), ())
    learner = Learner(
        knobs, params, ppo.ADAM.init(params), jnp.float32(progress), moments, moments, Local(jnp.zeros(1))
    )
    return ppo.take_step(sizes, learner, {"w": jnp.full(4, size / 2)})


@pytest.mark.parametrize(("progress", "share"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0)])
def test_the_learning_rate_falls_linearly_to_0(progress, share):
    """Adam's first step is as long as its rate."""
    after = stepped(Sizes(), Knobs(lr=0.1), progress)
    np.testing.assert_allclose(after.params["w"], -0.1 * share, rtol=1e-3)


def test_without_annealing_the_learning_rate_stays():
    after = stepped(Sizes(anneal=False), Knobs(lr=0.1), 0.9)
    np.testing.assert_allclose(after.params["w"], -0.1, rtol=1e-3)


@pytest.mark.parametrize(("norm", "want"), [(100.0, 0.5), (0.5, 0.5), (0.1, 0.1)])
def test_a_gradient_is_clipped_by_its_global_norm(norm, want):
    """Read off Adam's first moment, a tenth of what it was given."""
    after = stepped(Sizes(), Knobs(max_grad_norm=0.5), 0.0, norm)
    np.testing.assert_allclose(10 * np.linalg.norm(after.adam.mu["w"]), want, rtol=1e-4)


def test_a_gradient_as_small_as_adams_eps_takes_half_a_step():
    """lr * g / (g + eps), with the 1e-5 of Huang et al. 2022, detail 3."""
    after = stepped(Sizes(), Knobs(lr=0.1), 0.0, 2e-5)  # 1e-5 in each of four entries
    np.testing.assert_allclose(after.params["w"], -0.05, rtol=1e-3)


def test_a_zero_gradient_and_no_clipping_are_finite():
    assert np.all(stepped(Sizes(), Knobs(), 0.0, 0.0).params["w"] == 0)
    assert np.all(np.isfinite(stepped(Sizes(), Knobs(max_grad_norm=float("inf")), 0.0).params["w"]))


# --- Sizes ------------------------------------------------------------------------------------


def test_sizes_that_do_not_divide_name_numbers_that_would():
    with pytest.raises(ShoalError, match=r"96 is not divisible by minibatches = 5") as error:
        Sizes(num_envs=3, num_steps=32, minibatches=5)
    assert "4 or 6" in error.value.hint
    for minibatches in (4, 6):
        Sizes(num_envs=3, num_steps=32, minibatches=minibatches)
    with pytest.raises(ShoalError, match="not divisible") as error:
        Sizes(num_envs=1, num_steps=7, minibatches=9)
    assert "1 or 7" in error.value.hint


@pytest.mark.parametrize("name", ["num_envs", "num_steps", "epochs", "minibatches"])
def test_sizes_below_1_are_refused(name):
    with pytest.raises(ShoalError, match=f"--ppo.{name} 0 must be from 1"):
        Sizes(**{name: 0})


def test_rows_that_cannot_be_counted_are_refused_at_once():
    with pytest.raises(ShoalError, match=r"num_envs \* num_steps = 2,147,483,648 must be below"):
        Sizes(num_envs=2**16, num_steps=2**15, minibatches=7)
    with pytest.raises(ShoalError, match="not divisible"):
        Sizes(num_envs=1, num_steps=2**31 - 1, minibatches=7)


@pytest.mark.parametrize("hidden", [(0,), (64, -3), (2**40,)])
def test_a_layer_has_units(hidden):
    with pytest.raises(ShoalError, match="a layer has 1 to"):
        Sizes(hidden=hidden)


def test_an_unknown_activation_names_the_nearest():
    with pytest.raises(ShoalError, match="no activation is called 'rely'") as error:
        Sizes(activation="rely")
    assert "did you mean relu? use tanh, relu" in error.value.hint


def test_strata_divide_envs_and_leave_every_minibatch_its_equal_share():
    for envs in (1, 2, 3, 4, 5, 6, 8, 12, 16, 64):
        for steps in (1, 2, 5, 8, 128):
            for minibatches in (m for m in range(1, 9) if envs * steps % m == 0):
                strata = Sizes(num_envs=envs, num_steps=steps, minibatches=minibatches).strata
                assert envs % strata == 0
                assert envs * steps // strata % minibatches == 0
    assert Sizes(num_envs=64).strata == 8
    assert Sizes(num_envs=4).strata == 4


def test_the_policy_is_what_acting_needs_and_no_more():
    agent = tiny().agent
    learner = jax.eval_shape(agent.init, jax.random.key(0), Knobs())
    assert jax.eval_shape(agent.policy, learner)._fields == ("actor", "free", "obs_moments")
