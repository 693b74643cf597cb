"""TD3 on the probe ladder."""

import jax.numpy as jnp

import ladder
from ladder import GAMMA, Climber
from shoal.algos import td3
from shoal.algos.sac import both
from shoal.algos.td3 import Knobs, Sizes
from shoal.nets import house_net
from shoal.types import Box

SIZES = Sizes(
    num_envs=8,
    num_steps=2,
    minibatches=8,
    batch_size=64,
    buffer_size=4096,
    learning_starts=128,
    hidden=(32,),
)


def value(learner, obs, obs_space, action_space):
    """Of the greedy action."""
    net = house_net("auto", SIZES.hidden, SIZES.activation)
    actor, critic = net(obs_space, 1, 1.0), net({"obs": obs_space, "action": Box(-1.0, 1.0, (1,))}, 1, 1.0)
    action = jnp.tanh(actor.apply(learner.params.actor, obs))
    return jnp.min(both(critic, learner.params.critics, obs, action), 0)


class TestLadder(ladder.Acting, ladder.Valuing):
    climber = Climber(td3, SIZES, Knobs(lr=3e-3, gamma=GAMMA, tau=0.1), 250, value, continuous=True)
