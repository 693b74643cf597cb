"""Every random stream, derived from who draws it and what for.

A key depends on (seed, agent id, purpose, update number, global env index) and on nothing else, so
agent 7 draws the same numbers alone or among 4,096, on one device or eight, before or after a resume.
"""

import jax

from shoal.types import Array, Key

INIT, RESET, ROLLOUT, LEARN, EVALUATE, SEARCH, SELECT = range(7)  # purposes

IMPLEMENTATION = "threefry2x32"


def stream(seed: Array | int, agent: Array | int, purpose: int, *numbers: Array | int) -> Key:
    """The key of one agent for one purpose, and of an update or an env where `numbers` name one."""
    key = jax.random.key(seed, impl=IMPLEMENTATION)
    for number in (agent, purpose, *numbers):
        key = jax.random.fold_in(key, number)
    return key


def per_env(key: Key, index: Array) -> Key:
    """One key per global env index: index [B] -> [B]."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(index)


def bulk(key: Key, *shape: int) -> Key:
    """Keys of `shape` from one draw: far cheaper than deriving each where it is used."""
    bits = jax.random.bits(key, (*shape, 2), jax.numpy.uint32)
    return jax.random.wrap_key_data(bits, impl=IMPLEMENTATION)
