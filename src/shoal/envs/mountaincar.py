"""Drive a weak car out of a valley by rocking back and forth.

Source: Moore (1990), Sutton (1996), as in Gymnasium's MountainCar-v0. Nothing differs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.envs import draw
from shoal.envs.params import as_arrays
from shoal.types import Array, Box, Discrete, Env, Key, Step


class Params(NamedTuple):
    gravity: float = 0.0025  # per step², as all speeds are per step
    force: float = 0.001
    min_position: float = -1.2
    max_position: float = 0.6
    max_speed: float = 0.07
    goal_position: float = 0.5
    goal_velocity: float = 0.0  # the goal counts at this speed or faster


class State(NamedTuple):
    position: Array
    velocity: Array  # per step


def reset(key: Key, params: Params) -> tuple[State, Array]:
    """At rest, somewhere in -0.6 … -0.4 near the bottom of the valley."""
    state = State(jax.random.uniform(key, (), jnp.float32, -0.6, -0.4), jnp.float32(0))
    return state, jnp.stack(state)


def step(key: Key, state: State, action: Array, params: Params) -> Step:
    """Push left, not at all, or right (0, 1, 2); reward -1 per step until the goal on the right hill."""
    velocity = state.velocity + (action - 1) * params.force - jnp.cos(3 * state.position) * params.gravity
    velocity = jnp.clip(velocity, -params.max_speed, params.max_speed)
    position = jnp.clip(state.position + velocity, params.min_position, params.max_position)
    velocity = jnp.where(position == params.min_position, jnp.maximum(velocity, 0), velocity)
    terminated = (position >= params.goal_position) & (velocity >= params.goal_velocity)
    state = State(position, velocity)
    return Step(state, jnp.stack(state), jnp.float32(-1), terminated, jnp.bool_(False), {})


def obs_space(params: Params) -> Box:
    """`[position, velocity]`."""
    speed = float(params.max_speed)
    return Box((float(params.min_position), -speed), (float(params.max_position), speed), (2,))


def action_space(params: Params) -> Discrete:
    return Discrete(3)


def render(state: State, params: Params) -> Array:
    """The valley, the car on it and the flag, uint8 [H, W, 3]."""
    view = draw.canvas(params.min_position - 0.1, params.max_position + 0.1, -0.12)
    slope = 1.35 * jnp.cos(3 * view.x)
    view = draw.fill(view, (view.y - _height(view.x)) / jnp.hypot(1, slope), draw.STONE)

    goal = params.goal_position
    ground = _height(goal)
    view = draw.line(view, (goal, ground), (goal, ground + 0.2), 0.006, draw.INK)
    view = draw.box(view, (goal + 0.045, ground + 0.17), (0.045, 0.03), draw.GREEN)

    tilt = jnp.arctan(1.35 * jnp.cos(3 * state.position))
    cos, sin = jnp.cos(tilt), jnp.sin(tilt)

    def on_car(along: float, above: float) -> tuple[Array, Array]:
        return (
            state.position + along * cos - above * sin,
            _height(state.position) + along * sin + above * cos,
        )

    view = draw.line(view, on_car(-0.06, 0.07), on_car(0.06, 0.07), 0.035, draw.CORAL)
    view = draw.disc(view, on_car(-0.055, 0.03), 0.028, draw.INK)
    view = draw.disc(view, on_car(0.055, 0.03), 0.028, draw.INK)
    return draw.pixels(view)


def make() -> Env:
    return Env(
        "mountaincar",
        lambda: as_arrays(Params()),
        reset,
        step,
        obs_space,
        action_space,
        time_limit=200,
        render=render,
    )


def _height(position: float | Array) -> Array:
    return 0.45 * jnp.sin(3 * position) + 0.55
