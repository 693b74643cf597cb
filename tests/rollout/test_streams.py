"""Who draws, for what, and when, decides the numbers; nothing else does."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from shoal.rollout import streams
from shoal.rollout.streams import (
    EVALUATE,
    INIT,
    LEARN,
    RESET,
    ROLLOUT,
    SEARCH,
    SELECT,
    bulk,
    per_env,
    stream,
)

PURPOSES = INIT, RESET, ROLLOUT, LEARN, EVALUATE, SEARCH, SELECT


def bits(keys):
    return [tuple(row) for row in np.asarray(jax.random.key_data(keys)).reshape(-1, 2).tolist()]


def test_streams_are_distinct_over_seeds_agents_purposes_updates_and_envs():
    numbers = jnp.asarray(list(itertools.product(range(3), range(5), PURPOSES, range(4))), jnp.int32)
    keys = jax.jit(jax.vmap(lambda row: per_env(stream(*row), jnp.arange(6))))(numbers)
    assert len(set(bits(keys))) == len(numbers) * 6


def test_every_purpose_has_a_number_of_its_own():
    """Two that share one would draw the same: a selection, say, what a search has drawn."""
    assert len(set(PURPOSES)) == len(PURPOSES)
    assert sorted(PURPOSES) == sorted(x for x in vars(streams).values() if type(x) is int)  # none is missing


def test_small_numbers_in_different_places_do_not_meet():
    """Sums or products of the parts would: (seed 1, agent 2) and (seed 2, agent 1), or 0s anywhere."""
    numbers = jnp.asarray(list(itertools.product(range(4), repeat=4)), jnp.int32)
    assert len(set(bits(jax.jit(jax.vmap(lambda row: stream(*row)))(numbers)))) == 4**4


def test_env_keys_do_not_depend_on_how_many_envs_there_are_or_where_they_live():
    key = stream(1, 2, ROLLOUT, 3)
    eight = bits(per_env(key, jnp.arange(8)))
    assert bits(per_env(key, jnp.arange(3))) == eight[:3]
    assert bits(per_env(key, jnp.arange(4, 8))) == eight[4:]


def test_traced_and_plain_numbers_give_the_same_stream():
    traced = jax.jit(lambda seed, agent: stream(seed, agent, LEARN, 7))(jnp.uint32(5), jnp.int32(3))
    assert bits(traced) == bits(stream(5, 3, LEARN, 7))


def test_keys_drawn_in_bulk_are_usable_and_distinct():
    keys = bulk(jax.random.key(0), 50, 2)
    assert keys.shape == (50, 2)
    assert len(set(bits(keys))) == 100
    assert len(np.unique(jax.vmap(jax.random.uniform)(keys.ravel()))) == 100
