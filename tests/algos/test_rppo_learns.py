"""Recurrent PPO on the probe ladder, and on a task that PPO without memory cannot do."""

import jax
import jax.numpy as jnp
import numpy as np

import ladder
import probes
from ladder import GAMMA, SEEDS, Climber
from shoal.algos import ppo, rppo
from shoal.algos.rppo import Knobs, Sizes
from shoal.nets import house_net, recurrent
from shoal.types import Box, Discrete, Env, Step

CLIMBING = Sizes(num_envs=8, num_steps=8, minibatches=2, hidden=(8,), units=8)


def value(learner, obs, obs_space, action_space):
    """Of rows in order: one at a later time than the row before goes on with its episode."""
    net = house_net("auto", CLIMBING.hidden, CLIMBING.activation)
    critic = recurrent.make(net, obs_space, 1, 1.0, CLIMBING.units)
    fresh = jnp.concatenate([jnp.ones(1, bool), obs[1:, 1] <= obs[:-1, 1]])
    *_, outputs = critic.unroll(learner.params.critic, critic.carry()[None], obs[:, None], fresh[:, None])
    return outputs[:, 0, 0]


class TestLadder(ladder.Acting, ladder.Masked, ladder.Valuing):
    climber = Climber(rppo, CLIMBING, Knobs(lr=1e-2, gamma=GAMMA), 150, value)


DELAY = 3


def recall() -> Env:
    """A cue, ±1, is seen at the first step alone; reward 1 for answering it DELAY steps later."""

    def see(state):
        cue, time = state
        time = time.astype(jnp.float32)
        return jnp.stack([jnp.where(time == 0, cue, 0.0), time / DELAY])

    def reset(key, params):
        state = jnp.where(jax.random.bernoulli(key), 1.0, -1.0).astype(jnp.float32), jnp.int32(0)
        return state, see(state)

    def step(key, state, action, params):
        cue, time = state
        over, right = time == DELAY, action == (cue > 0)
        state = cue, time + 1
        return Step(state, see(state), (over & right).astype(jnp.float32), over, jnp.bool_(False), {})

    return Env("recall", tuple, reset, step, lambda _: Box(-1.0, 1.0, (2,)), lambda _: Discrete(2))


def recalled(algo, sizes):
    """Share of right answers in the last updates [seeds]."""
    _, metrics = probes.train(recall(), algo, sizes, Knobs(lr=1e-2), 100, SEEDS)
    return np.asarray(metrics["return_sum"][-8:].sum(0) / metrics["episodes"][-8:].sum(0))


def test_what_was_seen_some_steps_ago_is_recalled_which_ppo_cannot():
    assert np.all(recalled(rppo, CLIMBING) > 0.95)
    assert np.all(recalled(ppo, ppo.Sizes(num_envs=8, num_steps=8, minibatches=2, hidden=(16,))) < 0.6)
