"""Swing a two-link chain, driven only at the elbow, until its free end is above a line.

Source: Sutton (1996), the equations of Sutton & Barto's book, one RK4 step, as in Gymnasium's Acrobot-v1
without torque noise. Nothing differs.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.envs import draw
from shoal.envs.params import as_arrays
from shoal.types import Array, Box, Discrete, Env, Key, Step


class Params(NamedTuple):
    gravity: float = 9.8  # m/s²
    length: float = 1.0  # m, of the inner link; the outer one enters by its centre of mass only
    mass_1: float = 1.0  # kg, inner link
    mass_2: float = 1.0  # kg, outer link
    com_1: float = 0.5  # m, from the shoulder to the inner link's centre of mass
    com_2: float = 0.5  # m, from the elbow to the outer link's centre of mass
    inertia: float = 1.0  # kg m², of each link
    torque: float = 1.0  # N m, of one push
    dt: float = 0.2  # s
    max_velocity_1: float = 4 * math.pi  # rad/s
    max_velocity_2: float = 9 * math.pi  # rad/s
    goal_height: float = 1.0  # above the shoulder, for two links of length 1


class State(NamedTuple):
    theta_1: Array  # rad, of the inner link, 0 = hanging
    theta_2: Array  # rad, of the outer link relative to the inner one
    velocity_1: Array  # rad/s
    velocity_2: Array  # rad/s


def reset(key: Key, params: Params) -> tuple[State, Array]:
    """All four numbers uniform in ±0.1: hanging, almost at rest."""
    state = State(*jax.random.uniform(key, (4,), jnp.float32, -0.1, 0.1))
    return state, _obs(state)


def step(key: Key, state: State, action: Array, params: Params) -> Step:
    """Torque -1, 0 or +1 (action 0, 1, 2) at the elbow; reward -1 until the goal, 0 there."""
    torque = (action - 1) * params.torque
    half, full = params.dt / 2, params.dt
    k1 = _slope(state, torque, params)
    k2 = _slope(_move(state, k1, half), torque, params)
    k3 = _slope(_move(state, k2, half), torque, params)
    k4 = _slope(_move(state, k3, full), torque, params)
    slope = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, k1, k2, k3, k4)
    theta_1, theta_2, velocity_1, velocity_2 = _move(state, slope, full)
    state = State(
        _wrap(theta_1),
        _wrap(theta_2),
        jnp.clip(velocity_1, -params.max_velocity_1, params.max_velocity_1),
        jnp.clip(velocity_2, -params.max_velocity_2, params.max_velocity_2),
    )
    height = -jnp.cos(state.theta_1) - jnp.cos(state.theta_1 + state.theta_2)
    terminated = height > params.goal_height
    reward = terminated.astype(jnp.float32) - 1
    return Step(state, _obs(state), reward, terminated, jnp.bool_(False), {})


def obs_space(params: Params) -> Box:
    """`[cos θ1, sin θ1, cos θ2, sin θ2, velocity 1, velocity 2]`."""
    high = (1, 1, 1, 1, float(params.max_velocity_1), float(params.max_velocity_2))
    return Box([-bound for bound in high], high, (6,))


def action_space(params: Params) -> Discrete:
    return Discrete(3)


def render(state: State, params: Params) -> Array:
    """The chain and the line to reach, uint8 [H, W, 3]."""
    view = draw.canvas(-3.45, 3.45, -2.3)
    outer = state.theta_1 + state.theta_2
    elbow = (params.length * jnp.sin(state.theta_1), -params.length * jnp.cos(state.theta_1))
    tip = (elbow[0] + 2 * params.com_2 * jnp.sin(outer), elbow[1] - 2 * params.com_2 * jnp.cos(outer))
    goal = params.goal_height
    view = draw.line(view, (-3.2, goal), (3.2, goal), 0.02, draw.GREEN)
    view = draw.line(view, (0.0, 0.0), elbow, 0.1, draw.INK)
    view = draw.line(view, elbow, tip, 0.1, draw.BLUE)
    view = draw.disc(view, (0.0, 0.0), 0.11, draw.GOLD)
    view = draw.disc(view, elbow, 0.11, draw.GOLD)
    return draw.pixels(view)


def make() -> Env:
    return Env(
        "acrobot",
        lambda: as_arrays(Params()),
        reset,
        step,
        obs_space,
        action_space,
        time_limit=500,
        render=render,
    )


def _slope(state: State, torque: Array, params: Params) -> State:
    """Time derivative of the state; Gymnasium's `_dsdt` with cos(θ - π/2) written as sin(θ)."""
    theta_1, theta_2, velocity_1, velocity_2 = state
    m1, m2, l1, lc1, lc2 = params.mass_1, params.mass_2, params.length, params.com_1, params.com_2
    g, moi = params.gravity, params.inertia
    cos, sin = jnp.cos(theta_2), jnp.sin(theta_2)
    d1 = m1 * lc1**2 + m2 * (l1**2 + lc2**2 + 2 * l1 * lc2 * cos) + 2 * moi
    d2 = m2 * (lc2**2 + l1 * lc2 * cos) + moi
    phi2 = m2 * lc2 * g * jnp.sin(theta_1 + theta_2)
    phi1 = (
        -m2 * l1 * lc2 * (velocity_2**2 + 2 * velocity_2 * velocity_1) * sin
        + (m1 * lc1 + m2 * l1) * g * jnp.sin(theta_1)
        + phi2
    )
    acc_2 = (torque + d2 / d1 * phi1 - m2 * l1 * lc2 * velocity_1**2 * sin - phi2) / (
        m2 * lc2**2 + moi - d2**2 / d1
    )
    acc_1 = -(d2 * acc_2 + phi1) / d1
    return State(velocity_1, velocity_2, acc_1, acc_2)


def _move(state: State, slope: State, dt: float | Array) -> State:
    return jax.tree.map(lambda x, dx: x + dt * dx, state, slope)


def _wrap(angle: Array) -> Array:
    return (angle + math.pi) % (2 * math.pi) - math.pi


def _obs(state: State) -> Array:
    cos_1, sin_1 = jnp.cos(state.theta_1), jnp.sin(state.theta_1)
    cos_2, sin_2 = jnp.cos(state.theta_2), jnp.sin(state.theta_2)
    return jnp.stack([cos_1, sin_1, cos_2, sin_2, state.velocity_1, state.velocity_2])
