"""Balance a pole on a cart by pushing the cart left or right.

Source: Barto, Sutton & Anderson (1983), as in Gymnasium's CartPole-v1 (explicit Euler integration).
Differs only past an end: Gymnasium then pays 0, here every step pays 1.
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
    cart_mass: float = 1.0  # kg
    pole_mass: float = 0.1  # kg
    half_length: float = 0.5  # m, from the joint to the pole's centre of mass
    force: float = 10.0  # N, of one push
    dt: float = 0.02  # s
    x_limit: float = 2.4  # m, the episode ends beyond
    angle_limit: float = math.radians(12)  # rad, the episode ends beyond


class State(NamedTuple):
    x: Array  # m
    x_dot: Array  # m/s
    theta: Array  # rad, 0 = upright, positive to the right
    theta_dot: Array  # rad/s


def reset(key: Key, params: Params) -> tuple[State, Array]:
    """All four numbers uniform in ±0.05."""
    state = State(*jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05))
    return state, _obs(state)


def step(key: Key, state: State, action: Array, params: Params) -> Step:
    """Push left (0) or right (1); reward 1 per step; ends when the pole tips or the cart leaves the track."""
    x, x_dot, theta, theta_dot = state
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    mass = params.cart_mass + params.pole_mass
    moment = params.pole_mass * params.half_length
    force = jnp.where(action == 1, params.force, -params.force)

    # https://coneural.org/florian/papers/05_cart_pole.pdf, equations 23 and 24 without friction
    push = (force + moment * theta_dot**2 * sin) / mass
    theta_acc = (params.gravity * sin - cos * push) / (
        params.half_length * (4 / 3 - params.pole_mass * cos**2 / mass)
    )
    x_acc = push - moment * theta_acc * cos / mass
    state = State(
        x + params.dt * x_dot,
        x_dot + params.dt * x_acc,
        theta + params.dt * theta_dot,
        theta_dot + params.dt * theta_acc,
    )
    terminated = (jnp.abs(state.x) > params.x_limit) | (jnp.abs(state.theta) > params.angle_limit)
    return Step(state, _obs(state), jnp.float32(1), terminated, jnp.bool_(False), {})


def obs_space(params: Params) -> Box:
    """`[x, x_dot, theta, theta_dot]`; twice the limits, so that the observation at an end fits in."""
    high = (2 * float(params.x_limit), math.inf, 2 * float(params.angle_limit), math.inf)
    return Box([-bound for bound in high], high, (4,))


def action_space(params: Params) -> Discrete:
    return Discrete(2)


def render(state: State, params: Params) -> Array:
    """The track between the limits, uint8 [H, W, 3]."""
    view = draw.canvas(-1.2 * params.x_limit, 1.2 * params.x_limit, -0.9)
    joint = (state.x, 0.25)
    tip = (
        state.x + 2 * params.half_length * jnp.sin(state.theta),
        0.25 + 2 * params.half_length * jnp.cos(state.theta),
    )
    view = draw.line(view, (-params.x_limit, 0.0), (params.x_limit, 0.0), 0.02, draw.STONE)
    view = draw.box(view, (state.x, 0.12), (0.32, 0.16), draw.INK, corner=0.05)
    view = draw.line(view, joint, tip, 0.055, draw.CORAL)
    view = draw.disc(view, joint, 0.06, draw.GOLD)
    return draw.pixels(view)


def make() -> Env:
    return Env(
        "cartpole",
        lambda: as_arrays(Params()),
        reset,
        step,
        obs_space,
        action_space,
        time_limit=500,
        render=render,
    )


def _obs(state: State) -> Array:
    return jnp.stack(state)
