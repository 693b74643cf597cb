"""One env under examination: what it says of itself, and what a random play of it shows.

`check` judges this; nothing here does. Whatever is costly is worked out once, when first asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.envs import spaces
from shoal.types import Array, Box, Discrete, Env, Key, Params, Space, Step, Tree

LANES = 16  # envs that play at random; more play a constant extreme action each
EXTREMES = 48  # at most so many of those
HOMES = LANES + EXTREMES  # resets: a start for each lane, and what a start looks like


class Seen(NamedTuple):
    """What one lane of the play noted, per step; `low` and `high` over all its steps."""

    ended: Array  # bool [T]
    inside: Array  # bool [T] the observation is in its space
    finite: Array  # bool [T] no NaN anywhere, no infinity in observation and reward
    finite_past: Array  # bool [T] the same of one step past an end
    home: Array  # bool [T] state and observation look like a reset's
    home_before: Array  # bool [T] … so did those before the step
    choice: Array  # bool [T] the mask allowed something
    low: Tree  # least observation
    high: Tree  # greatest observation


@dataclass(frozen=True)
class Case:
    """One env under examination and what several checks need of it."""

    env: Env
    key: Key
    steps: int
    given: Params = None  # instead of the default params

    @cached_property
    def params(self) -> Params:
        return self.env.default_params() if self.given is None else self.given

    @cached_property
    def obs_space(self) -> Space:
        return self.env.obs_space(self.params)

    @cached_property
    def action_space(self) -> Space:
        return self.env.action_space(self.params)

    @cached_property
    def reset_spec(self) -> tuple[Tree, Tree]:
        return jax.eval_shape(self.env.reset, self.key, self.params)

    @cached_property
    def step_spec(self) -> Step:
        action = jax.eval_shape(partial(spaces.sample, space=self.action_space), self.key)
        return jax.eval_shape(self.env.step, self.key, self.reset_spec[0], action, self.params)

    @cached_property
    def extremes(self) -> Tree:
        """[K, …] actions at the edges of the action space: every choice, every bound."""
        edges = jax.tree.map(_edges, self.action_space, is_leaf=spaces.is_space)
        count = max(len(edge) for edge in jax.tree.leaves(edges))
        return jax.tree.map(lambda edge: jnp.asarray(edge[np.arange(count) % len(edge)]), edges)

    @cached_property
    def keys(self) -> Key:
        """[HOMES + lanes] keys, split once: compiling random numbers is most of the time of a check."""
        return jax.random.split(self.key, 2 * HOMES)

    @cached_property
    def homes(self) -> tuple[Tree, Tree]:
        """[HOMES, …] (state, obs) of resets."""
        return jax.jit(jax.vmap(self.env.reset, (0, None)))(self.keys[:HOMES], self.params)

    @cached_property
    def seen(self) -> Seen:
        """[lanes, …] the play: LANES at random, then one lane per extreme action (-1 = random)."""
        count = 0 if self.env.action_mask else len(jax.tree.leaves(self.extremes)[0])
        extreme = np.concatenate([np.full(LANES, -1), np.arange(count)])
        homes = jax.tree.map(lambda x: x[: len(extreme)], self.homes)
        play = jax.jit(jax.vmap(partial(_play, self), (0, 0, 0, None)))
        keys = self.keys[HOMES : HOMES + len(extreme)]
        return jax.tree.map(np.asarray, play(keys, homes, extreme, _hull(self.homes)))

    def start(self, key: Key) -> tuple[tuple[Tree, Tree], Step]:
        """A reset and one random step."""
        state, obs = self.env.reset(key, self.params)
        mask = self.env.action_mask(state, self.params) if self.env.action_mask else None
        action = spaces.sample(key, self.action_space, mask)
        return (state, obs), self.env.step(key, state, action, self.params)

    @cached_property
    def started(self) -> Callable:
        """`start`, compiled."""
        return jax.jit(self.start)


# --- The play ---------------------------------------------------------------------------------


def _play(case: Case, key: Key, home: Tree, extreme: Array, hull: tuple[list, list]) -> Seen:
    """`case.steps` steps of one lane from its `home` (state, obs) with random (-1) or one constant action.

    `over` marks an ended episode: its one step past the end is judged apart, then the lane is back home
    (a reset inside the loop would double the time to compile it).
    """
    env, params = case.env, case.params

    def body(carry: tuple, keys: Key) -> tuple[tuple, Seen]:
        state, obs, over, low, high = carry
        action_key, step_key = keys
        mask = env.action_mask(state, params) if env.action_mask else None
        action = spaces.sample(action_key, case.action_space, mask)
        if mask is None:
            action = jax.tree.map(
                lambda x, edge: jnp.where(extreme < 0, x, edge[extreme]), action, case.extremes
            )
        step = env.step(step_key, state, action, params)
        finite = _finite(step)
        ended = ~over & (step.terminated | step.truncated)
        keep = partial(jnp.where, over)
        low = jax.tree.map(keep, low, jax.tree.map(jnp.minimum, low, step.obs))
        high = jax.tree.map(keep, high, jax.tree.map(jnp.maximum, high, step.obs))
        notes = Seen(
            ended=ended,
            inside=over | spaces.contains(case.obs_space, step.obs),
            finite=over | finite,
            finite_past=~over | finite,
            home=_within((step.state, step.obs), hull),
            home_before=_within((state, obs), hull),
            choice=jnp.bool_(True) if mask is None else over | _has_choice(case.action_space, mask),
            low=(),
            high=(),
        )
        state, obs = jax.tree.map(keep, home, (step.state, step.obs))
        return (state, obs, ended, low, high), notes

    state, obs = home
    carry = (state, obs, jnp.bool_(False), obs, obs)
    (*_, low, high), notes = jax.lax.scan(body, carry, jax.random.split(key, (case.steps, 2)))
    return notes._replace(low=low, high=high)


def _edges(leaf: Space) -> np.ndarray:
    """[K, …] every choice of a Discrete (if not too many), else the lowest and the highest value."""
    low, high = spaces.bounds(leaf)
    if isinstance(leaf, Discrete):
        return np.unique(np.linspace(0, leaf.n - 1, EXTREMES).round().astype(np.int32))
    if isinstance(leaf, Box) and np.issubdtype(leaf.dtype, np.floating):
        low, high = np.maximum(low, -1e3), np.minimum(high, 1e3)  # where there is no bound
    return np.stack([low, high]).astype(leaf.dtype)


def _has_choice(space: Space, mask: Tree) -> Array:
    """bool []: every entry of the action has an allowed value."""
    rows = jax.tree.map(spaces.mask_rows, space, mask, is_leaf=spaces.is_space)
    return jnp.stack([row.any() for row in jax.tree.leaves(rows)]).all()


def _finite(step: Step) -> Array:
    """bool []: no NaN, and no infinity but in the state, where a record may start at one."""
    floats = [x for x in numbers((step.obs, step.reward)) if jnp.issubdtype(x.dtype, jnp.floating)]
    states = [x for x in numbers(step.state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats] + [~jnp.isnan(x).any() for x in states]).all()


def _hull(resets: Tree) -> tuple[list, list]:
    """Least and greatest numbers of many resets, a tenth wider: what a reset looks like."""
    leaves = [np.asarray(leaf).astype(np.float32) for leaf in numbers(resets)]
    low, high = [leaf.min(0) for leaf in leaves], [leaf.max(0) for leaf in leaves]
    return [a - 0.1 * (b - a) for a, b in zip(low, high)], [b + 0.1 * (b - a) for a, b in zip(low, high)]


def _within(tree: Tree, hull: tuple[list, list]) -> Array:
    return jnp.stack([((a <= x) & (x <= b)).all() for x, a, b in zip(numbers(tree), *hull)]).all()


def numbers(tree: Tree) -> list[Array]:
    """The leaves as numeric arrays: typed PRNG keys as their words, Python numbers as scalars."""
    leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in jax.tree.leaves(tree)]
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
