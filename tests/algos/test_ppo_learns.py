"""PPO on the probe ladder, and on structured and continuous spaces."""

import numpy as np

import ladder
import probes
from ladder import GAMMA, SEEDS, Climber
from shoal.algos import ppo
from shoal.algos.ppo import Knobs, Sizes
from shoal.nets import house_net

SIZES = Sizes(num_envs=8, num_steps=16, minibatches=2, hidden=(32,))


def value(learner, obs, obs_space, action_space):
    critic = house_net("auto", SIZES.hidden, SIZES.activation)(obs_space, 1, 1.0)
    return critic.apply(learner.params.critic, obs)[:, 0]


class TestLadder(ladder.Acting, ladder.Masked, ladder.Valuing):
    climber = Climber(ppo, SIZES, Knobs(lr=1e-2, gamma=GAMMA), 120, value)


def test_dict_observations_with_an_image_and_multi_discrete_actions_are_learned():
    _, metrics = probes.train(probes.structured(), ppo, SIZES, Knobs(lr=1e-2), 80, SEEDS)
    score = np.asarray(metrics["return_sum"] / metrics["episodes"])
    assert np.all(score[0] < 0.6)
    assert np.all(score[-5:].mean(0) > 0.95)


def test_a_continuous_target_in_awkward_units_is_learned():
    sizes = Sizes(
        num_envs=8, num_steps=16, minibatches=2, hidden=(32,), normalize_obs=True, normalize_reward=True
    )
    _, metrics = probes.train(probes.target(), ppo, sizes, Knobs(lr=1e-2, ent_coef=0.0), 120, SEEDS)
    score = np.asarray(metrics["return_sum"] / metrics["episodes"])
    assert np.all(score[0] < -100)
    assert np.all(score[-5:].mean(0) > -20)  # a fifth of a unit off, of a range of four
