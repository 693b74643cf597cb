"""Breakout against MinAtar's: whole episodes, cell by cell; only its random numbers are ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from minatar.environment import Environment

from shoal.envs import breakout

ENV = breakout.make()
ORIGINAL_ACTION = [0, 1, 3]  # MinAtar's numbers of no-op, left, right


class Scripted:
    """Stands in for MinAtar's random state: an action sticks when we say so."""

    sticks = False

    def rand(self) -> float:
        return 0.0 if self.sticks else 1.0


def play(params, steps):
    """[T, …] of a play that follows the ball, mostly, so that walls are cleared; reset at its ends."""

    def body(state, key):
        action_key, mix_key, step_key, reset_key = jax.random.split(key, 4)
        follow = jnp.where(state.ball_x < state.paddle, 1, jnp.where(state.ball_x > state.paddle, 2, 0))
        wander = jax.random.randint(action_key, (), 0, 3)
        action = jnp.where(jax.random.bernoulli(mix_key, 0.985), follow, wander)
        step = ENV.step(step_key, state, action, params)
        sticks = jax.random.bernoulli(step_key, params.sticky_prob)
        fresh, _ = ENV.reset(reset_key, params)
        after = jax.tree.map(lambda a, b: jnp.where(step.terminated, a, b), fresh, step.state)
        return after, (state, action, sticks, step)

    state, _ = ENV.reset(jax.random.key(0), params)
    _, played = jax.jit(lambda s: jax.lax.scan(body, s, jax.random.split(jax.random.key(1), steps)))(state)
    return jax.tree.map(np.asarray, played)


@pytest.mark.parametrize("sticky_prob", [0.0, 0.1])
def test_whole_episodes_are_minatars(sticky_prob):
    states, actions, sticks, step = play(breakout.Params(jnp.float32(sticky_prob)), 10_000)
    original = Environment("breakout", sticky_action_prob=0.5)
    original.random = Scripted()
    fresh = True
    for t in range(len(actions)):
        if fresh:
            original.env.reset()
            original.env.ball_x, original.env.ball_dir = states.ball_x[t], states.direction[t]
            original.env.last_x = original.env.ball_x
            original.last_action = 0
        original.random.sticks = sticks[t]
        reward, fresh = original.act(ORIGINAL_ACTION[actions[t]])
        assert step.reward[t] == reward
        assert step.terminated[t] == fresh
        np.testing.assert_array_equal(step.obs[t], original.state(), err_msg=f"step {t}")

    assert step.terminated.sum() >= 20
    refills = np.diff(step.state.bricks.sum((1, 2))) > 0
    assert (refills & ~step.terminated[:-1]).sum() >= 1
    assert not step.truncated.any()


def test_a_reset_is_one_of_minatars_two():
    keys = jax.random.split(jax.random.key(0), 2000)
    states, obs = jax.jit(jax.vmap(ENV.reset, (0, None)))(keys, ENV.default_params())
    original = Environment("breakout")
    originals = {}
    while len(originals) < 2:
        original.reset()
        originals[original.env.ball_x] = (original.env.ball_dir, original.state())
    for x, (direction, picture) in originals.items():
        chosen = np.asarray(states.ball_x) == x
        assert 900 < chosen.sum() < 1100  # 4.5 standard deviations
        assert (np.asarray(states.direction)[chosen] == direction).all()
        assert (np.asarray(obs)[chosen] == picture).all()


@pytest.mark.parametrize("prob", [0.1, 0.4])
def test_actions_stick_as_often_as_asked(prob):
    """Within 4.5 standard deviations; what sticks is the action that was carried out before."""
    params = breakout.Params(jnp.float32(prob))
    state, _ = ENV.reset(jax.random.key(0), params)
    state = state._replace(last_action=jnp.int32(2))
    keys = jax.random.split(jax.random.key(1), 20_000)
    after = jax.jit(jax.vmap(lambda key: ENV.step(key, state, jnp.int32(1), params).state))(keys)
    stuck = np.asarray(after.paddle == state.paddle + 1)
    assert abs(stuck.mean() - prob) < 4.5 * np.sqrt(prob * (1 - prob) / len(stuck))
    np.testing.assert_array_equal(after.last_action, np.where(stuck, 2, 1))
