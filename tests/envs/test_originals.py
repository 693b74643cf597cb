"""The classic-control envs against Gymnasium's, step by step.

Every step starts from our state, which is copied into Gymnasium's env: these systems amplify the difference
between float32 and float64, so that only single steps can be compared to a tight tolerance.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from shoal.envs import acrobot, cartpole, mountaincar, mountaincar_continuous, pendulum, spaces
from shoal.types import Discrete, Env, Key, Step


class Pair(NamedTuple):
    env: Env
    original: str
    pump: Callable  # (state, params) -> an action that puts energy in, so that goals are reached
    attributes: dict[str, str]  # our knob -> Gymnasium's attribute


PAIRS = [
    Pair(
        cartpole.make(),
        "CartPole-v1",
        lambda state, params: (state.theta + 0.5 * state.theta_dot > 0).astype(jnp.int32),
        {
            "gravity": "gravity",
            "cart_mass": "masscart",
            "pole_mass": "masspole",
            "half_length": "length",
            "force": "force_mag",
            "dt": "tau",
            "x_limit": "x_threshold",
            "angle_limit": "theta_threshold_radians",
        },
    ),
    Pair(
        acrobot.make(),
        "Acrobot-v1",
        lambda state, params: 1 + jnp.sign(state.velocity_2).astype(jnp.int32),
        {
            "length": "LINK_LENGTH_1",
            "mass_1": "LINK_MASS_1",
            "mass_2": "LINK_MASS_2",
            "com_1": "LINK_COM_POS_1",
            "com_2": "LINK_COM_POS_2",
            "inertia": "LINK_MOI",
            "dt": "dt",
            "max_velocity_1": "MAX_VEL_1",
            "max_velocity_2": "MAX_VEL_2",
        },
    ),
    Pair(
        mountaincar.make(),
        "MountainCar-v0",
        lambda state, params: jnp.where(state.velocity < 0, 0, 2),
        {
            "gravity": "gravity",
            "force": "force",
            "min_position": "min_position",
            "max_position": "max_position",
            "max_speed": "max_speed",
            "goal_position": "goal_position",
            "goal_velocity": "goal_velocity",
        },
    ),
    Pair(
        mountaincar_continuous.make(),
        "MountainCarContinuous-v0",
        lambda state, params: jnp.where(state.velocity < 0, -1.3, 1.3).reshape(1),  # and beyond the bounds
        {
            "power": "power",
            "min_position": "min_position",
            "max_position": "max_position",
            "max_speed": "max_speed",
            "goal_position": "goal_position",
            "goal_velocity": "goal_velocity",
        },
    ),
    Pair(
        pendulum.make(),
        "Pendulum-v1",
        lambda state, params: jnp.where(state.theta_dot < 0, -3.0, 3.0).reshape(1),
        {
            "gravity": "g",
            "mass": "m",
            "length": "l",
            "dt": "dt",
            "max_speed": "max_speed",
            "max_torque": "max_torque",
        },
    ),
]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.env.name)


def play(pair: Pair, params: Any, steps: int) -> tuple[Any, Any, Step]:
    """[T, …] states before, actions and steps of a play, a third of it at random, with resets at its ends."""
    env = pair.env
    space = env.action_space(params)

    def body(state: Any, key: Key) -> tuple:
        action_key, mix_key, step_key, reset_key = jax.random.split(key, 4)
        pump = jax.random.bernoulli(mix_key, 2 / 3)
        action = jnp.where(pump, pair.pump(state, params), spaces.sample(action_key, space))
        step = env.step(step_key, state, action, params)
        fresh, _ = env.reset(reset_key, params)
        after = jax.tree.map(lambda a, b: jnp.where(step.terminated, a, b), fresh, step.state)
        return after, (state, action, step)

    state, _ = env.reset(jax.random.key(1), params)
    _, played = jax.jit(lambda s: jax.lax.scan(body, s, jax.random.split(jax.random.key(2), steps)))(state)
    return jax.tree.map(np.asarray, played)


def compare(pair: Pair, params: Any, original: gymnasium.Env, steps: int) -> np.ndarray:
    """Hold every step of a play against the original; returns the terminations seen."""
    states, actions, step = play(pair, params, steps)
    discrete = isinstance(original.action_space, gymnasium.spaces.Discrete)
    obs, reward, terminated = [], [], []
    for state, action in zip(np.stack(states, axis=1).astype(np.float64), actions):
        original.state = state
        original.steps_beyond_terminated = None  # CartPole's memory of an end
        o, r, end, truncated, _ = original.step(int(action) if discrete else action)
        assert not truncated
        obs.append(o)
        reward.append(r)
        terminated.append(end)
    np.testing.assert_allclose(step.obs, obs, atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(step.reward, reward, atol=1e-4, rtol=1e-5)
    np.testing.assert_array_equal(step.terminated, terminated)
    assert not step.truncated.any()
    return step.terminated


@each_pair
def test_every_step_is_gymnasiums(pair):
    original = gymnasium.make(pair.original).unwrapped
    original.reset(seed=0)
    terminated = compare(pair, pair.env.default_params(), original, 3000)
    assert terminated.sum() >= 5 or pair.env.name == "pendulum"  # which never ends


@each_pair
def test_knobs_act_as_gymnasiums_attributes(pair):
    """All knobs at once, each changed by a factor of its own."""
    original = gymnasium.make(pair.original).unwrapped
    original.reset(seed=0)
    params = pair.env.default_params()
    for i, (knob, name) in enumerate(pair.attributes.items()):
        value = float(getattr(params, knob)) * (1.1 + 0.05 * i) + 0.001 * (knob == "goal_velocity")
        params = params._replace(**{knob: jnp.float32(value)})
        setattr(original, name, float(np.float32(value)))
    if pair.env.name == "cartpole":  # Gymnasium keeps these products
        original.total_mass = original.masspole + original.masscart
        original.polemass_length = original.masspole * original.length
    compare(pair, params, original, 500)


@each_pair
def test_resets_are_drawn_like_gymnasiums(pair):
    """Kolmogorov–Smirnov on each number of the state, alpha 0.001 with fixed seeds."""
    original = gymnasium.make(pair.original).unwrapped
    original.reset(seed=0)
    theirs = np.array([(original.reset(), np.array(original.state))[1] for _ in range(1000)])
    keys = jax.random.split(jax.random.key(3), 4000)
    states, _ = jax.jit(jax.vmap(pair.env.reset, (0, None)))(keys, pair.env.default_params())
    for ours, column in zip(states, theirs.T):
        assert stats.ks_2samp(np.asarray(ours), column).pvalue > 0.001


@each_pair
def test_spaces_and_time_limit_are_gymnasiums(pair):
    original, params = gymnasium.make(pair.original), pair.env.default_params()
    assert pair.env.time_limit == original.spec.max_episode_steps
    low, high = spaces.bounds(pair.env.obs_space(params))
    np.testing.assert_allclose(low, original.observation_space.low, rtol=1e-6)
    np.testing.assert_allclose(high, original.observation_space.high, rtol=1e-6)
    action_space = pair.env.action_space(params)
    if isinstance(action_space, Discrete):
        assert action_space.n == original.action_space.n
    else:
        low, high = spaces.bounds(action_space)
        np.testing.assert_array_equal(low, original.action_space.low)
        np.testing.assert_array_equal(high, original.action_space.high)


def test_pendulum_keeps_its_angle_within_half_turns():
    states, _, _ = play(PAIRS[-1], pendulum.make().default_params(), 2000)
    assert np.abs(states.theta).max() <= math.pi + 1e-6
    assert np.abs(np.diff(states.theta)).max() > math.pi  # it did turn over


@each_pair
def test_spaces_can_be_asked_for_inside_a_trace(pair):
    """Where jnp arithmetic on the params would give tracers."""
    env, params = pair.env, pair.env.default_params()
    found = []

    @jax.jit
    def program():
        found.append((env.obs_space(params), env.action_space(params)))

    program()
    assert found == [(env.obs_space(params), env.action_space(params))]
