"""SAC on the probe ladder, at a small fixed temperature so that soft values are hardly more than values."""

import jax.numpy as jnp

import ladder
from ladder import GAMMA, Climber
from shoal.algos import sac
from shoal.algos.sac import Knobs, Sizes
from shoal.nets import house_net
from shoal.types import Box

SIZES = Sizes(
    num_envs=8,
    num_steps=2,
    minibatches=8,
    batch_size=64,
    buffer_size=4096,
    learning_starts=128,
    tune_alpha=False,
    hidden=(32,),
)


def value(learner, obs, obs_space, action_space):
    """Of the greedy action."""
    net = house_net("auto", SIZES.hidden, SIZES.activation)
    actor, critic = net(obs_space, 2, 1.0), net({"obs": obs_space, "action": Box(-1.0, 1.0, (1,))}, 1, 1.0)
    action = jnp.tanh(actor.apply(learner.params.actor, obs)[:, :1])
    return jnp.min(sac.both(critic, learner.params.critics, obs, action), 0)


class TestLadder(ladder.Acting, ladder.Valuing):
    climber = Climber(
        sac, SIZES, Knobs(lr=3e-3, gamma=GAMMA, tau=0.05, alpha=0.01), 250, value, continuous=True
    )
