"""Recurrent PPO piece by piece: memory follows episodes in rollout, targets and loss alike."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from probes import lane
from shoal.algos import ppo, rppo
from shoal.algos.rppo import Knobs, Sizes
from shoal.errors import ShoalError
from shoal.nets import house_net, recurrent
from shoal.ops.distributions import distribution
from shoal.rollout import device
from shoal.types import WHOLE, Batch, Discrete

ENV = probes.walk()
SIZES = Sizes(num_envs=12, num_steps=10, epochs=2, minibatches=3, hidden=(6,), units=5, normalize_obs=True)
AGENT = probes.agent_for(ENV, rppo, SIZES)
KNOBS = Knobs()._replace(gamma=0.9, gae_lambda=0.8)
DIST = distribution(Discrete(3))
ACTOR, CRITIC = (
    recurrent.make(house_net("auto", SIZES.hidden, "tanh"), ENV.obs_space(()), n, scale, SIZES.units)
    for n, scale in ((3, 0.01), (1, 1.0))
)


@pytest.fixture(scope="module")
def prepared():
    """Learner, batches, and what prepare makes of a second rollout: episodes and memory are under way."""

    def run(key):
        learner = AGENT.init(key, KNOBS)
        leaves, tree = jax.tree.flatten(learner.params)
        keys = jax.random.split(key, len(leaves))
        leaves = [x + 0.7 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)]
        learner = learner._replace(
            params=jax.tree.unflatten(tree, leaves), local=device.spread(learner.local, SIZES.num_envs)
        )
        params, number = ENV.default_params(), jnp.arange(SIZES.num_envs)
        actors = device.start(AGENT, ENV, params, device.reset_key(0, 0), number)
        batches = []
        for update in range(2):
            keys = device.rollout_keys(jnp.uint32(0), jnp.int32(0), jnp.int32(update), number)
            carry, policy = actors.carry, AGENT.policy(learner)
            actors, columns, _ = device.collect(AGENT, ENV, policy, actors, params, keys, SIZES.num_steps)
            key = jax.random.key(update)
            batches.append(Batch(**columns, carry=carry, keys=keys, key=key, progress=jnp.float32(0.25)))
            before, (learner, data, rows) = learner, AGENT.prepare(learner, batches[-1], WHOLE)
        return before, batches, learner, data, rows

    return jax.jit(run)(jax.random.key(0))


def test_the_rollouts_end_episodes_at_every_position_and_in_every_way(prepared):
    _, batches, _, _, _ = prepared
    ended = np.asarray(batches[1].terminated | batches[1].truncated)
    assert ended.any(1).all()
    assert np.asarray(batches[1].terminated).any(1).sum() > 5
    assert np.asarray(batches[1].truncated).any(1).sum() > 5
    assert (np.abs(np.asarray(batches[1].carry)).max(1) > 0).any()


# --- The right flag ---------------------------------------------------------------------------


def recomputed(learner, data, fresh):
    *_, outputs = ACTOR.unroll(learner.params.actor, data.carry.actor, data.steps.obs, fresh)
    return DIST.log_prob(outputs, learner.params.free, data.steps.mask, data.steps.sample)


def test_log_probs_of_the_update_are_those_of_the_rollout_across_episode_borders(prepared):
    learner, batches, _, data, _ = prepared
    got = np.asarray(recomputed(learner, data, data.fresh))
    np.testing.assert_allclose(got, batches[1].extras["log_prob"], atol=1e-5)


def test_any_other_flag_would_be_seen(prepared):
    learner, batches, _, data, _ = prepared
    never, late = jnp.zeros_like(data.fresh), batches[1].terminated | batches[1].truncated
    for fresh in (never, late):
        wrong = np.asarray(recomputed(learner, data, fresh))
        assert np.abs(wrong - batches[1].extras["log_prob"]).max() > 0.01


def test_the_first_ratio_is_1(prepared):
    before, _, learner, data, rows = prepared
    assert not np.allclose(before.obs_moments.mean[0], learner.obs_moments.mean[0])
    grad = jax.jit(AGENT.grad)
    for i in range(SIZES.epochs * SIZES.minibatches):
        _, count, outputs = grad(learner, data, lane(rows, i))
        assert count == SIZES.num_envs * SIZES.num_steps / SIZES.minibatches
        assert outputs.metrics["clip_fraction"] == 0
        assert abs(outputs.metrics["approx_kl"] / count) < 1e-6


# --- Targets ----------------------------------------------------------------------------------


def slow_values(learner, batches, moments):
    """Of each step of the second rollout and of its next observation, one step after the other from a reset.

    The first rollout was seen through no moments, the second one through those of the first.
    """
    params = learner.params.critic
    step = jax.jit(lambda carry, obs: CRITIC.step(params, carry, obs))
    carry = jnp.zeros((SIZES.num_envs, SIZES.units))
    for batch, moment in zip(batches, moments):
        value, after = [], []
        seen = partial(ppo.seen, SIZES, moment)
        for t in range(SIZES.num_steps):
            carry, out = step(carry, seen(batch.obs[t]))
            value.append(out[:, 0])
            after.append(step(carry, seen(batch.final_obs[t]))[1][:, 0])
            ended = batch.terminated[t] | batch.truncated[t]
            carry = jnp.where(ended[:, None], 0.0, carry)
    return np.stack(value), np.stack(after), carry


def test_values_remember_each_episode_also_at_its_true_final_observation(prepared):
    """And from rollout to rollout: nothing but the first reset was given to the slow version."""
    before, batches, learner, data, _ = prepared
    moments = AGENT.init(jax.random.key(0), KNOBS).obs_moments, before.obs_moments
    value, after, carry = slow_values(learner, batches, moments)
    np.testing.assert_allclose(data.steps.value, value, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(learner.local.critic_carry, carry, rtol=1e-3, atol=1e-4)
    batch, ended = batches[1], batches[1].terminated | batches[1].truncated
    following = np.where(ended, after, np.concatenate([value[1:], after[-1:]]))
    want = np.zeros((SIZES.num_steps + 1, SIZES.num_envs))
    for t in reversed(range(SIZES.num_steps)):
        future = np.where(batch.terminated[t], 0, following[t])
        trace = np.where(ended[t], 0, KNOBS.gae_lambda * want[t + 1])
        want[t] = batch.reward[t] + KNOBS.gamma * (future + trace) - value[t]
    np.testing.assert_allclose(data.steps.target, want[:-1] + value, rtol=1e-3, atol=1e-3)


def test_minibatches_are_whole_sequences_with_their_own_normalised_advantages(prepared):
    _, _, _, data, rows = prepared
    for epoch in np.asarray(rows.index).reshape(SIZES.epochs, -1):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(SIZES.num_envs))
    for index, advantage in zip(rows.index, np.asarray(rows.advantage)):
        raw = np.asarray(data.steps.target - data.steps.value).T[np.asarray(index)]
        np.testing.assert_allclose(advantage, (raw - raw.mean()) / raw.std(ddof=1), atol=1e-4)


# --- Gradient ---------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_loss_taken_step_by_step(prepared):
    _, _, learner, data, rows = prepared
    rows = lane(rows, 1)
    steps, fresh = jax.tree.map(lambda x: x[:, rows.index], (data.steps, data.fresh))

    def outputs(net, params, carry):
        carry, column = carry[rows.index], []
        for t in range(SIZES.num_steps):
            carry, out = net.step(params, jnp.where(fresh[t][:, None], 0.0, carry), steps.obs[t])
            column.append(out)
        return jnp.stack(column)

    def plain(params):
        logits, value = (
            outputs(net, getattr(params, name), getattr(data.carry, name))
            for net, name in ((ACTOR, "actor"), (CRITIC, "critic"))
        )
        arguments = logits, value[..., 0], steps, rows.advantage.T
        return ppo.objective(DIST, SIZES, learner.knobs, params.free, *arguments)[0]

    want = jax.jit(jax.grad(plain))(learner.params)
    got, _, _ = jax.jit(AGENT.grad)(learner, data, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), got, want)


# --- Placement, sizes -------------------------------------------------------------------------


def test_two_devices_equal_one():
    sizes = Sizes(num_envs=4, num_steps=8, epochs=2, minibatches=2, hidden=(4,), units=4)
    start = probes.alone(ENV, rppo, sizes, KNOBS)
    one, two = (probes.placed(ENV, rppo, sizes, start, shards) for shards in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, two)


@pytest.mark.parametrize(("envs", "minibatches", "fit"), [(6, 4, "4 or 8"), (2, 4, "4")])
def test_envs_that_do_not_divide_are_refused_with_numbers_that_would(envs, minibatches, fit):
    wrong = f"num_envs = {envs} is not divisible by minibatches = {minibatches}"
    with pytest.raises(ShoalError, match=wrong) as error:
        Sizes(num_envs=envs, minibatches=minibatches)
    assert error.value.hint == f"try --rppo.num_envs {fit}"


def test_the_smallest_of_all_updates_has_no_nan():
    sizes = Sizes(num_envs=1, num_steps=1, epochs=1, minibatches=1, hidden=(), units=1, normalize_reward=True)
    state, metrics = probes.train(probes.ladder(), rppo, sizes, Knobs(), 3, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.learner, metrics)))


def test_the_policy_holds_no_critic():
    learner = jax.eval_shape(AGENT.init, jax.random.key(0), Knobs())
    assert jax.eval_shape(AGENT.policy, learner)._fields == ("actor", "free", "obs_moments")
