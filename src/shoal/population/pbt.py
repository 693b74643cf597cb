"""Population-based training (Jaderberg et al. 2017, arXiv:1711.09846), on the device.

Truncation selection: the worst quarter of the agents each become a copy of one of the best quarter, drawn
at random, and the copy's knobs are moved. A copy takes everything but the identity: seed, number and
counters stay, so it goes on with random streams of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.algos.update import AgentState
from shoal.population.search import Axis, moved, value_of, with_value
from shoal.rollout.device import choose
from shoal.rollout.streams import SELECT, stream
from shoal.types import Array

QUANTILE = 0.25  # of the agents, but one at least; the worst are replaced, the best are copied


class Selection(NamedTuple):
    """What one selection did, per lane [P]."""

    parent: Array  # int32 lane that it is a copy of: its own where it was kept
    score: Array  # mean return since the last selection; NaN without an episode, -inf once diverged


def scores(state: AgentState) -> Array:
    """Mean return of the episodes that ended since the last selection [P]; NaN for none.

    A diverged agent scores below all others; a padding lane, which has no agent, is NaN.
    """
    identity, episodes = state.identity, state.episodes
    score = jnp.where(episodes.count > 0, episodes.return_sum / jnp.maximum(episodes.count, 1), jnp.nan)
    return jnp.where(identity.budget > 0, jnp.where(identity.active, score, -jnp.inf), jnp.nan)


def select(axes: tuple[Axis, ...], updates: Array, state: AgentState) -> tuple[AgentState, Selection]:
    """One selection of a whole population (leaves led by lanes) after `updates` of the run."""
    score, identity = scores(state), state.identity
    keys = jax.vmap(lambda seed, agent: stream(seed, agent, SELECT, updates))(identity.seed, identity.agent)
    keys = jax.vmap(lambda key: jax.random.split(key, 1 + len(axes)), out_axes=1)(keys)
    parent = parents(score, jax.vmap(jax.random.uniform)(keys[0]))
    copied = parent != jnp.arange(parent.size)
    after = jax.tree.map(lambda x: x[parent], state)
    after = after._replace(identity=identity._replace(active=identity.active | copied))
    for axis, key in zip(axes, keys[1:]):
        value = value_of(axis, after)
        change = jnp.where(copied, jax.vmap(lambda v, k, axis=axis: moved(axis, v, k))(value, key), value)
        after = with_value(axis, after, change)
    return counted_anew(after), Selection(parent, score)


def counted_anew(state: AgentState) -> AgentState:
    """The state with no episodes counted, but for agents that have no score yet and go on collecting."""
    nothing = jax.tree.map(jnp.zeros_like, state.episodes)
    return state._replace(episodes=choose(~jnp.isnan(scores(state)), nothing, state.episodes))


def parents(score: Array, share: Array) -> Array:
    """Whom each lane becomes a copy of, int32 [P]; its own number where it is kept.

    `share` [P], 0 … 1, says which of the best each of the worst would copy. Lanes with a NaN score take no
    part; nobody copies an agent that scores no higher.
    """
    lane = jnp.arange(score.size, dtype=jnp.int32)
    known = ~jnp.isnan(score)
    # Ranks by comparing all with all: few agents, and no sort, which XLA's CPU backend is slow at.
    lower = (score < score[:, None]) | ((score == score[:, None]) & (lane < lane[:, None]))
    rank = jnp.sum(lower & known, axis=1)
    number = jnp.sum(known)
    cut = jnp.where(number > 1, jnp.maximum(1, jnp.floor(number * QUANTILE)), 0).astype(jnp.int32)
    chosen = number - 1 - jnp.minimum(share * cut, cut - 1).astype(jnp.int32)  # the rank to copy
    parent = jnp.argmax((rank == chosen[:, None]) & known, axis=1).astype(jnp.int32)
    copies = known & (rank < cut) & (score[parent] > score)
    return jnp.where(copies, parent, lane)
