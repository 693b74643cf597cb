"""PQN: targets and loss against the obvious version, its schedules, and the probe ladder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ladder
import probes
from ladder import GAMMA, Climber
from shoal.algos import pqn
from shoal.algos.pqn import Knobs, Sizes
from shoal.errors import ShoalError
from shoal.nets import house_net
from shoal.rollout import device
from shoal.types import WHOLE, Batch, Box, Discrete, MultiDiscrete

ENV = probes.walk()
SIZES = Sizes(num_envs=4, num_steps=16, epochs=2, minibatches=4, hidden=(8,))
CLIMBING = Sizes(num_envs=8, num_steps=16, minibatches=2, hidden=(32,), activation="tanh")
AGENT = probes.agent_for(ENV, pqn, SIZES)
KNOBS = Knobs()._replace(q_lambda=0.8, gamma=0.9)


def network(sizes, obs_space, action_space):
    return house_net("auto", sizes.hidden, sizes.activation, sizes.layer_norm)(obs_space, action_space.n, 1.0)


def q_of(params, obs):
    return network(SIZES, ENV.obs_space(()), Discrete(3)).apply(params, obs)


@pytest.fixture(scope="module")
def prepared():
    """Learner, batch, data and rows of a rollout with every kind of end, of a policy that sees its obs."""

    def run(key):
        learner = AGENT.init(key, KNOBS)
        params = ENV.default_params()
        number = jnp.arange(SIZES.num_envs)
        actors = device.start(AGENT, ENV, params, device.reset_key(0, 0), number)
        keys = device.rollout_keys(jnp.uint32(0), jnp.int32(0), jnp.int32(0), number)
        policy = AGENT.policy(learner)
        _, columns, _ = device.collect(AGENT, ENV, policy, actors, params, keys, SIZES.num_steps)
        batch = Batch(**columns, carry=(), keys=keys, key=key, progress=jnp.float32(0.25))
        return learner, batch, *AGENT.prepare(learner, batch, WHOLE)

    return jax.jit(run)(jax.random.key(0))


# --- Targets ----------------------------------------------------------------------------------


def slow_targets(learner, batch):
    """By the paper's recursion, one env at a time, over allowed actions only."""
    best = lambda obs, mask: np.where(mask, np.asarray(q_of(learner.params, obs)), -np.inf).max(-1)
    value = np.stack([best(*row) for row in zip(batch.obs, np.asarray(batch.mask))])
    final = np.stack([best(*row) for row in zip(batch.final_obs, np.asarray(batch.final_mask))])
    steps, envs = batch.reward.shape
    target = np.zeros((steps, envs))
    for b in range(envs):
        for t in reversed(range(steps)):
            reward, gamma, trace = batch.reward[t, b], KNOBS.gamma, KNOBS.q_lambda
            if batch.terminated[t, b]:
                target[t, b] = reward
            elif batch.truncated[t, b] or t == steps - 1:
                target[t, b] = reward + gamma * final[t, b]
            else:
                mixed = trace * target[t + 1, b] + (1 - trace) * value[t + 1, b]
                target[t, b] = reward + gamma * mixed
    return target


def test_targets_are_peng_returns_over_allowed_actions(prepared):
    learner, batch, after, data, rows = prepared
    assert np.asarray(batch.terminated).any()
    assert np.asarray(batch.truncated).any()
    want = slow_targets(learner, batch)
    np.testing.assert_allclose(data.target.reshape(want.shape), want, rtol=1e-4, atol=1e-5)
    assert after.progress == 0.25
    for epoch in np.asarray(rows).reshape(SIZES.epochs, -1):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(want.size))


def test_forbidden_actions_are_never_taken(prepared):
    _, batch, *_ = prepared
    assert np.take_along_axis(np.asarray(batch.mask), np.asarray(batch.action)[..., None], -1).all()
    assert len(np.unique(batch.action)) == 3


# --- Gradient ---------------------------------------------------------------------------------


def test_gradient_and_metrics_are_those_of_the_mean_squared_error(prepared):
    _, _, learner, data, rows = prepared
    index = rows[1]

    def plain(params):
        value = q_of(params, data.obs[index])[jnp.arange(len(index)), data.action[index]]
        return 0.5 * jnp.mean((value - data.target[index]) ** 2), jnp.mean(value)

    (loss, value), gradient = jax.value_and_grad(plain, has_aux=True)(learner.params)
    numerator, count, outputs = jax.jit(AGENT.grad)(learner, data, index)
    close = lambda a, b: np.testing.assert_allclose(a / count, b, rtol=1e-4, atol=1e-5)
    assert count == SIZES.num_envs * SIZES.num_steps // SIZES.minibatches
    jax.tree.map(close, numerator, gradient)
    close(outputs.metrics["value_loss"], loss)
    close(outputs.metrics["q_value"], value)


def test_steps_are_rectified_adams():
    """Liu et al. 2020, algorithm 2; plain momentum up to rho = 5, as in the authors' code, not 4."""
    gradients = np.random.default_rng(0).normal(1.0, 0.5, (9, 4))
    w, mean, square, limit, rectified = np.zeros(4), 0.0, 0.0, 2 / (1 - 0.999) - 1, []
    learner = pqn.Learner(Knobs(lr=0.1), {"w": jnp.zeros(4)}, (), jnp.float32(0))
    learner = learner._replace(radam=pqn.RADAM.init(learner.params))
    for t, gradient in enumerate(gradients, 1):
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        step, freedom = mean / (1 - 0.9**t), limit - 2 * t * 0.999**t / (1 - 0.999**t)
        rectified.append(freedom > 5)
        if rectified[-1]:
            known = (freedom - 4) * (freedom - 2) * limit / ((limit - 4) * (limit - 2) * freedom)
            step *= np.sqrt(known * (1 - 0.999**t) / square)
        w = w - 0.1 * step
        learner = pqn._apply(Sizes(anneal=False), learner, {"w": jnp.asarray(gradient, jnp.float32)})
        np.testing.assert_allclose(learner.params["w"], w, rtol=1e-3)
    assert len(set(rectified)) == 2


@pytest.mark.parametrize(("anneal", "progress", "share"), [(True, 0.25, 0.75), (True, 1, 0), (False, 0.9, 1)])
def test_the_learning_rate_falls_linearly_to_0_where_annealed(anneal, progress, share):
    def moved(lr, progress, anneal):
        params = {"w": jnp.zeros(4)}
        state = pqn.RADAM.init(params)
        learner = pqn.Learner(Knobs(lr=lr), params, state, jnp.float32(progress))
        return pqn._apply(Sizes(anneal=anneal), learner, {"w": jnp.ones(4)}).params["w"]

    whole = moved(0.1, 0.0, False)
    assert np.all(whole < 0)
    np.testing.assert_allclose(moved(0.1, progress, anneal), share * whole, rtol=1e-5)


def test_exploration_falls_with_the_budget_and_the_greedy_policy_has_none(prepared):
    learner = prepared[0]._replace(knobs=Knobs(epsilon_start=0.8, epsilon_end=0.2, exploration=0.5))
    epsilons = [AGENT.policy(learner._replace(progress=jnp.float32(x))).epsilon for x in (0, 0.25, 0.5, 1)]
    np.testing.assert_allclose(epsilons, [0.8, 0.5, 0.2, 0.2], rtol=1e-6)


# --- Placement, sizes, spaces -----------------------------------------------------------------


def test_two_devices_equal_one():
    start = probes.alone(ENV, pqn, SIZES, KNOBS)
    one, two = (probes.placed(ENV, pqn, SIZES, start, shards) for shards in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, two)


def test_the_smallest_of_all_updates_has_no_nan():
    sizes = Sizes(num_envs=1, num_steps=1, epochs=1, minibatches=1, hidden=(4,))
    state, metrics = probes.train(probes.ladder(), pqn, sizes, Knobs(), 3, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.learner, metrics)))


def test_sizes_that_do_not_fit_are_refused_with_numbers():
    with pytest.raises(ShoalError, match=r"96 is not divisible by minibatches = 5") as error:
        Sizes(num_envs=3, num_steps=32, minibatches=5)
    assert "--pqn.minibatches 4 or 6" in error.value.hint
    with pytest.raises(ShoalError, match=r"--pqn.epochs 0 must be from 1"):
        Sizes(epochs=0)
    assert Sizes().strata == 4


@pytest.mark.parametrize("space", [Box(-1, 1, (2,)), MultiDiscrete((2, 3)), {"a": Discrete(2)}])
def test_actions_that_are_not_discrete_are_refused(space):
    with pytest.raises(ShoalError, match="pqn needs discrete actions, not"):
        pqn.make(Box(-1, 1, (2,)), space, SIZES, house_net("auto", (8,), "relu"))


# --- Learning ---------------------------------------------------------------------------------


def value(learner, obs, obs_space, action_space):
    """Of the better of the two actions that are allowed on every rung."""
    return network(CLIMBING, obs_space, action_space).apply(learner.params, obs)[:, 1:].max(-1)


class TestLadder(ladder.Acting, ladder.Masked, ladder.Valuing):
    climber = Climber(pqn, CLIMBING, Knobs(lr=1e-2, gamma=GAMMA, epsilon_end=0.0), 200, value)
