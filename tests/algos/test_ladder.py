"""Every rung of the probe ladder: what fails here says where to look.

One population climbs all rungs in one program, three seeds a rung, every seed must pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from probes import ACTING, BOTH, CONSTANT, DELAYED, FORBIDDEN, LIMITED, RUNGS, SEEING, Rung
from shoal.algos.ppo import Knobs, Sizes
from shoal.nets import house_net

SEEDS, GAMMA = 3, 0.9
SIZES = Sizes(num_envs=8, num_steps=16, minibatches=2, hidden=(32,))


@pytest.fixture(scope="module")
def climbed():
    """(rung, obs) -> values [seeds, rows]; (rung, obs) -> action probabilities; rung -> mean last return."""
    env, rungs = probes.ladder(), np.repeat(np.asarray(RUNGS, np.int32), SEEDS)
    state, metrics = probes.train(
        env, SIZES, Knobs(lr=1e-2, gamma=GAMMA), 120, len(rungs), Rung(jnp.asarray(rungs))
    )
    make = house_net("auto", SIZES.hidden, SIZES.activation)
    actor, critic = (make(env.obs_space(Rung()), size, 1.0) for size in (3, 1))
    of = lambda tree, rung: jax.tree.map(lambda x: x[rungs == rung], tree)
    read = lambda net, tree, rung, obs: jax.vmap(net.apply, (0, None))(of(tree, rung), jnp.asarray(obs))
    value = lambda rung, obs: np.asarray(read(critic, state.learner.params.critic, rung, obs)[..., 0])
    chance = lambda rung, obs: np.asarray(jax.nn.softmax(read(actor, state.learner.params.actor, rung, obs)))
    score = lambda rung: np.asarray(metrics["return_sum"] / metrics["episodes"])[-5:, rungs == rung].mean(0)
    return value, chance, score


def test_a_constant_is_learned_as_a_value(climbed):
    value, *_ = climbed
    np.testing.assert_allclose(value(CONSTANT, [[0.0, 0.0]]), 1.0, atol=0.05)


def test_the_critic_sees_the_observation(climbed):
    value, *_ = climbed
    np.testing.assert_allclose(value(SEEING, [[-1.0, 0.0], [1.0, 0.0]]), [[-1.0, 1.0]] * SEEDS, atol=0.1)


def test_a_delayed_reward_is_discounted_back(climbed):
    value, *_ = climbed
    want = [[GAMMA**2, GAMMA, 1.0]] * SEEDS
    np.testing.assert_allclose(value(DELAYED, [[0.0, -1.0], [0.0, 0.0], [0.0, 1.0]]), want, atol=0.05)


def test_the_actor_learns_which_action_pays(climbed):
    _, chance, score = climbed
    assert np.all(chance(ACTING, [[0.0, 0.0]])[:, 0, 1] > 0.95)
    assert np.all(score(ACTING) > 0.95)


def test_the_actor_sees_the_observation(climbed):
    _, chance, score = climbed
    seen = chance(BOTH, [[1.0, 0.0], [-1.0, 0.0]])
    assert np.all(seen[:, 0, 1] > 0.95)
    assert np.all(seen[:, 1, 2] > 0.95)
    assert np.all(score(BOTH) > 0.95)


def test_a_time_limit_does_not_shorten_what_a_value_sees(climbed):
    """Reward 1 for ever is worth 1 / (1 - 0.9) = 10; cut off after five steps unbootstrapped, at most 4.1."""
    value, *_ = climbed
    np.testing.assert_allclose(value(LIMITED, [[0.0, 0.0]]), 10.0, atol=0.5)


def test_the_best_allowed_action_is_learned_beside_a_better_forbidden_one(climbed):
    _, _, score = climbed
    assert np.all(score(FORBIDDEN) > 0.9)
    assert np.all(score(FORBIDDEN) <= 1.0)  # the forbidden one pays 5


def test_dict_observations_with_an_image_and_multi_discrete_actions_are_learned():
    _, metrics = probes.train(probes.structured(), SIZES, Knobs(lr=1e-2), 80, SEEDS)
    score = np.asarray(metrics["return_sum"] / metrics["episodes"])
    assert np.all(score[0] < 0.6)
    assert np.all(score[-5:].mean(0) > 0.95)


def test_a_continuous_target_in_awkward_units_is_learned():
    sizes = Sizes(
        num_envs=8, num_steps=16, minibatches=2, hidden=(32,), normalize_obs=True, normalize_reward=True
    )
    _, metrics = probes.train(probes.target(), sizes, Knobs(lr=1e-2, ent_coef=0.0), 120, SEEDS)
    score = np.asarray(metrics["return_sum"] / metrics["episodes"])
    assert np.all(score[0] < -100)
    assert np.all(score[-5:].mean(0) > -20)  # a fifth of a unit off, of a range of four
