"""MountainCar with a throttle: reach the goal with little effort.

Source: Gymnasium's MountainCarContinuous-v0; state, start and picture are MountainCar's. Nothing differs:
as there, the force is clipped to the action space and the cost is not.
"""

from typing import NamedTuple

import jax.numpy as jnp

from shoal.envs.mountaincar import State, obs_space, render, reset
from shoal.envs.params import as_arrays
from shoal.types import Array, Box, Env, Key, Step


class Params(NamedTuple):
    gravity: float = 0.0025  # per step², as all speeds are per step
    power: float = 0.0015  # acceleration at full throttle
    min_position: float = -1.2
    max_position: float = 0.6
    max_speed: float = 0.07
    goal_position: float = 0.45
    goal_velocity: float = 0.0  # the goal counts at this speed or faster
    goal_reward: float = 100.0
    action_cost: float = 0.1  # times the squared throttle, paid every step


def step(key: Key, state: State, action: Array, params: Params) -> Step:
    """Throttle [1] in -1 … 1; reward 100 at the goal, minus a tenth of the squared throttle."""
    throttle = action[0]
    force = jnp.clip(throttle, -1, 1) * params.power
    velocity = state.velocity + force - params.gravity * jnp.cos(3 * state.position)
    velocity = jnp.clip(velocity, -params.max_speed, params.max_speed)
    position = jnp.clip(state.position + velocity, params.min_position, params.max_position)
    velocity = jnp.where(position == params.min_position, jnp.maximum(velocity, 0), velocity)
    terminated = (position >= params.goal_position) & (velocity >= params.goal_velocity)
    reward = terminated * params.goal_reward - params.action_cost * throttle**2
    state = State(position, velocity)
    return Step(state, jnp.stack(state), reward, terminated, jnp.bool_(False), {})


def action_space(params: Params) -> Box:
    return Box(-1.0, 1.0, (1,))


def make() -> Env:
    return Env(
        "mountaincar-continuous",
        lambda: as_arrays(Params()),
        reset,
        step,
        obs_space,
        action_space,
        time_limit=999,
        render=render,
    )
