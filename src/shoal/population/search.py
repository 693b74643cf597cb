"""What a search varies: one axis per knob, with the values it may take, drawn at first and moved later.

Everything here is for one agent, from keys or numbers given; callers vmap.
"""

import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.algos.update import AgentState
from shoal.rollout.streams import SEARCH, stream
from shoal.types import Array, Key

RESAMPLE = 0.25  # chance that a moved knob is drawn anew (Jaderberg et al. 2017, arXiv:1711.09846)
FACTOR = 1.25  # a logarithmic knob is multiplied or divided by this
SHARE = 0.1  # any other moves by this share of its range


class Axis(NamedTuple):
    """A knob, or a param of the env, and where its values lie."""

    name: str  # as on the command line: ppo.lr, env.gravity
    low: float
    high: float
    log: bool = False  # evenly spread in the logarithm; low is above 0
    whole: bool = False  # whole numbers only
    choices: tuple[float, ...] = ()  # only these, in this order
    stride: int = 0  # of choices that are dealt out: agents in a row with the same one; 0 = all are drawn

    @property
    def of_env(self) -> bool:
        return self.name.startswith("env.")

    @property
    def field(self) -> str:
        return self.name.rpartition(".")[2]


def at(axis: Axis, share: Array) -> Array:
    """The value below which `share` (0 … 1) of the axis lies."""
    if axis.choices:
        place = jnp.minimum(share * len(axis.choices), len(axis.choices) - 1).astype(jnp.int32)
        return jnp.asarray(axis.choices, jnp.float32)[place]
    if axis.log:
        value = jnp.exp((1 - share) * math.log(axis.low) + share * math.log(axis.high))
    else:
        value = (1 - share) * axis.low + share * axis.high
    return _kept(axis, value)


def drawn(axis: Axis, seed: Array, agent: Array) -> Array:
    """An agent's first value: it follows from the seed, the agent's number and the axis alone.

    Choices that are dealt out go to agents by their number, so that several axes make a grid.
    """
    if axis.choices and axis.stride:
        return jnp.asarray(axis.choices, jnp.float32)[agent // axis.stride % len(axis.choices)]
    key = stream(seed, agent, SEARCH, zlib.crc32(axis.name.encode()) & 0x7FFFFFFF)
    return at(axis, jax.random.uniform(key))


def moved(axis: Axis, value: Array, key: Key) -> Array:
    """A value near `value`, or now and then any other of the axis; never outside it, and 0 moves as well."""
    anew_key, fresh_key, way_key = jax.random.split(key, 3)
    up = jax.random.bernoulli(way_key)
    if axis.choices:
        table = jnp.asarray(axis.choices, jnp.float32)
        place = jnp.argmin(jnp.abs(table - value)) + jnp.where(up, 1, -1)
        near = table[jnp.clip(place, 0, len(axis.choices) - 1)]
    elif axis.log:
        near = value * jnp.where(up, FACTOR, 1 / FACTOR)
    else:
        step = max(SHARE * (axis.high - axis.low), 1.0 if axis.whole else 0.0)
        near = value + jnp.where(up, step, -step)
    fresh = at(axis, jax.random.uniform(fresh_key))
    return _kept(axis, jnp.where(jax.random.bernoulli(anew_key, RESAMPLE), fresh, near))


def value_of(axis: Axis, state: AgentState) -> Array:
    """The value in force."""
    return getattr(state.env_params if axis.of_env else state.learner.knobs, axis.field)


def with_value(axis: Axis, state: AgentState, value: Array) -> AgentState:
    """The state with another value in force, of the same dtype."""
    value = value.astype(value_of(axis, state).dtype)
    if axis.of_env:
        return state._replace(env_params=state.env_params._replace(**{axis.field: value}))
    knobs = state.learner.knobs._replace(**{axis.field: value})
    return state._replace(learner=state.learner._replace(knobs=knobs))


def _kept(axis: Axis, value: Array) -> Array:
    value = jnp.round(value) if axis.whole else value
    return jnp.clip(value, min(axis.choices, default=axis.low), max(axis.choices, default=axis.high))
