"""Lanes: the places of a population's agents in one program.

A lane is masked when its agent has spent its budget, has diverged, or is only padding; masking and
refilling change values, never shapes, so nothing recompiles.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.algos.update import AgentState, Identity, Metrics
from shoal.errors import ShoalError
from shoal.rollout.device import choose
from shoal.types import Array, Tree


def identities(seed: int, agents: int, budget: int, lanes: int) -> Identity:
    """Agents 0 … agents - 1 of one seed, and inactive padding up to `lanes`; leaves are [lanes]."""
    number = np.arange(lanes, dtype=np.int32)
    columns: dict[str, Any] = dict(
        seed=np.full(lanes, seed, np.uint32),
        agent=number,
        updates=np.zeros(lanes, np.int32),
        budget=np.where(number < agents, budget, 0).astype(np.int32),
        active=number < agents,
    )
    return Identity(**columns)


def stacked(tree: Tree, lanes: int) -> Tree:
    """The same value for every lane, as strongly typed float32 or int32 leaves [lanes, …]."""

    def one(x):
        x = np.asarray(x)
        x = x.astype(np.int32 if x.dtype.kind in "iub" else np.float32)
        return np.broadcast_to(x, (lanes, *x.shape)).copy()

    return jax.tree.map(one, tree)


def resize(state: Tree, lanes: int) -> Tree:
    """The first `lanes` lanes, or with copies of lane 0 as inactive padding behind; leaves [P, …]."""
    have = state.identity.active.shape[0]
    if have >= lanes:
        return jax.tree.map(lambda x: x[:lanes], state)
    pad = lambda x: jnp.concatenate([x, jnp.broadcast_to(x[:1], (lanes - have, *x.shape[1:]))])
    state = jax.tree.map(pad, state)
    identity, number = state.identity, jnp.arange(lanes, dtype=jnp.int32)
    return state._replace(
        identity=identity._replace(
            active=identity.active & (number < have),
            budget=jnp.where(number < have, identity.budget, 0),
            agent=jnp.where(number < have, identity.agent, number),
        )
    )


def leave(state: AgentState, lane: Array | int) -> AgentState:
    """The agent in a lane, as leaves without the lane axis: all there is of it. Its lane is left as it is."""
    _check_lane(state, lane)
    return jax.tree.map(lambda x: x[lane], state)


def enter(state: AgentState, lane: Array | int, newcomer: AgentState) -> AgentState:
    """The population with `newcomer` (leaves without the lane axis) in a lane, whoever was there before.

    The newcomer may be fresh, or have left this or another population of the same fingerprint; it goes on
    where it was, and its neighbours keep their bits. Only values change: nothing recompiles.
    """
    _check_lane(state, lane)
    return jax.tree.map(lambda x, new: x.at[lane].set(new), state, newcomer)


def refill(state: AgentState, lanes: Array, newcomers: AgentState) -> AgentState:
    """`enter` for many lanes at once: newcomers are led by lanes too, and enter where `lanes` [P] is True."""
    if lanes.shape != (have := state.identity.active.shape):
        raise ShoalError(f"refill: lanes has shape {list(lanes.shape)}, expected {list(have)}")
    return choose(lanes, newcomers, state)


def _check_lane(state: AgentState, lane: Array | int) -> None:
    """ShoalError for a number that names no lane; one that is only known to the program is clipped by it."""
    lanes = state.identity.active.shape[0]
    if not isinstance(lane, jax.core.Tracer) and not 0 <= lane < lanes:
        raise ShoalError(f"there is no lane {lane}: the population has {lanes}", f"use 0 to {lanes - 1}")


def contained(update: Callable[[AgentState], tuple[AgentState, Metrics]]) -> Callable:
    """An update of one lane that leaves a masked lane as it is and freezes one that diverges.

    A lane whose learner would cease to be finite keeps its state from before that update, with `active`
    unset: it can be looked at, and its neighbours' bits are their own. Replay is neither kept nor read, since
    a copy of it would cost more than the update: its next steps are there already, the same ones that the
    lane would write again if it went on.
    """

    def step(state: AgentState) -> tuple[AgentState, Metrics]:
        identity = state.identity
        running = identity.active & (identity.updates < identity.budget)
        after, metrics = update(state)
        # Knobs are given, not learned, and may be infinite: max_grad_norm = inf switches clipping off.
        healthy = all_finite(after.learner._replace(knobs=(), replay=()))
        frozen = state._replace(
            identity=identity._replace(active=identity.active & (healthy | ~running)),
            learner=state.learner._replace(replay=after.learner.replay),
        )
        kept = choose(running & healthy, after, frozen)
        return kept, {name: jnp.where(running & healthy, value, 0.0) for name, value in metrics.items()}

    return step


def all_finite(tree: Tree) -> Array:
    """Whether no floating leaf holds a NaN or an infinity, bool []: times zero, both are NaN.

    As a product with zeros it runs at the speed of memory; asking each number cost a DQN update 7 % on a CPU.
    """
    floats = [x.ravel() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.asarray(sum(x @ jnp.zeros_like(x) for x in floats) == 0)
