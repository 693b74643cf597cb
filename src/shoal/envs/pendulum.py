"""Swing a pendulum up and hold it there with a motor too weak to lift it at once.

Source: Gymnasium's Pendulum-v1. Differs in the state only: the angle is kept in -π … π, where Gymnasium lets
it grow; no observation or reward depends on that, and float32 keeps its precision in long episodes.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.envs import draw
from shoal.envs.params import as_arrays
from shoal.types import Array, Box, Env, Key, Step


class Params(NamedTuple):
    gravity: float = 10.0  # m/s²
    mass: float = 1.0  # kg
    length: float = 1.0  # m
    dt: float = 0.05  # s
    max_speed: float = 8.0  # rad/s
    max_torque: float = 2.0  # N m


class State(NamedTuple):
    theta: Array  # rad, 0 = upright, positive counter-clockwise
    theta_dot: Array  # rad/s


def reset(key: Key, params: Params) -> tuple[State, Array]:
    """Any angle, angular velocity uniform in ±1."""
    theta, theta_dot = jax.random.uniform(key, (2,), jnp.float32, -1, 1)
    state = State(math.pi * theta, theta_dot)
    return state, _obs(state)


def step(key: Key, state: State, action: Array, params: Params) -> Step:
    """Torque [1]; reward minus the cost of angle, speed and torque before the step; never ends by itself."""
    theta, theta_dot = state
    torque = jnp.clip(action[0], -params.max_torque, params.max_torque)
    cost = theta**2 + 0.1 * theta_dot**2 + 0.001 * torque**2
    acc = 1.5 * params.gravity / params.length * jnp.sin(theta) + 3 * torque / (
        params.mass * params.length**2
    )
    theta_dot = jnp.clip(theta_dot + acc * params.dt, -params.max_speed, params.max_speed)
    theta = (theta + theta_dot * params.dt + math.pi) % (2 * math.pi) - math.pi
    state = State(theta, theta_dot)
    return Step(state, _obs(state), -cost, jnp.bool_(False), jnp.bool_(False), {})


def obs_space(params: Params) -> Box:
    """`[cos θ, sin θ, angular velocity]`."""
    high = (1, 1, float(params.max_speed))
    return Box([-bound for bound in high], high, (3,))


def action_space(params: Params) -> Box:
    torque = float(params.max_torque)
    return Box(-torque, torque, (1,))


def render(state: State, params: Params) -> Array:
    """The pendulum, uint8 [H, W, 3]."""
    view = draw.canvas(-1.95 * params.length, 1.95 * params.length, -1.3 * params.length)
    tip = (-params.length * jnp.sin(state.theta), params.length * jnp.cos(state.theta))
    view = draw.disc(view, (0.0, 0.0), 0.16, draw.STONE)
    view = draw.line(view, (0.0, 0.0), tip, 0.09, draw.CORAL)
    view = draw.disc(view, (0.0, 0.0), 0.05, draw.INK)
    return draw.pixels(view)


def make() -> Env:
    return Env(
        "pendulum",
        lambda: as_arrays(Params()),
        reset,
        step,
        obs_space,
        action_space,
        time_limit=200,
        render=render,
    )


def _obs(state: State) -> Array:
    return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot])
