"""DQN on the probe ladder, plain and with everything on."""

import ladder
from ladder import GAMMA, Climber
from shoal.algos import dqn
from shoal.algos.dqn import Knobs, Sizes
from shoal.nets import house_net

SIZES = Sizes(
    num_envs=8,
    num_steps=2,
    minibatches=8,
    batch_size=32,
    buffer_size=1024,
    learning_starts=128,
    target_every=64,
    hidden=(32,),
)
ALL = Sizes(**{**vars(SIZES), "dueling": True, "prioritised": True, "n_step": 2})
KNOBS = Knobs(lr=1e-2, gamma=GAMMA, epsilon_end=0.0)


def value(sizes, learner, obs, obs_space, action_space):
    """Of the best action."""
    net = house_net("auto", sizes.hidden, sizes.activation)
    q = net(obs_space, action_space.n + sizes.dueling, 1.0).apply(learner.params, obs)
    return (dqn._dueling(q) if sizes.dueling else q).max(-1)


def climber(sizes):
    return Climber(dqn, sizes, KNOBS, 300, lambda *given, **spaces: value(sizes, *given, **spaces))


class TestLadder(ladder.Acting, ladder.Masked, ladder.Valuing):
    climber = climber(SIZES)


class TestLadderWithAll(ladder.Acting, ladder.Masked, ladder.Valuing):
    climber = climber(ALL)
