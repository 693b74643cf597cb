"""Spaces: what is sampled is contained, what is described comes back."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.envs import spaces
from shoal.types import Box, Discrete, MultiDiscrete

pytestmark = pytest.mark.usefixtures("quick_compiles")


def floats() -> st.SearchStrategy:
    low = st.one_of(st.just(-math.inf), st.floats(-100, 0, width=32))
    high = st.one_of(st.just(math.inf), st.floats(0.125, 100, width=32))
    return st.tuples(st.lists(low, min_size=3, max_size=3), high).map(lambda bounds: Box(*bounds, (3,)))


LEAVES = st.one_of(
    floats(),
    st.integers(1, 9).map(Discrete),
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(MultiDiscrete),
    st.just(Box(0, 255, (2, 2), np.uint8)),
    st.just(Box(-(2**31), 2**31 - 1, (), np.int32)),
    st.just(Box(False, True, (4,), bool)),
)
TREES = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        st.lists(part, min_size=1, max_size=2),
        st.lists(part, min_size=1, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from(["arm", "eye"]), part, min_size=1),
    ),
    max_leaves=3,
)


@settings(max_examples=40, deadline=None)
@given(TREES, st.integers(0, 1000))
def test_samples_are_contained_and_come_back_from_strict_json(space, seed):
    x = spaces.sample(jax.random.key(seed), space)
    assert spaces.contains(space, x)
    text = json.dumps(spaces.to_json(space), allow_nan=False)
    assert spaces.from_json(json.loads(text)) == space
    assert jax.tree.structure(spaces.zeros(space)) == jax.tree.structure(x)


def test_samples_reach_the_whole_space():
    def many(space, mask=None):
        keys = jax.random.split(jax.random.key(0), 500)
        return np.asarray(jax.vmap(lambda key: spaces.sample(key, space, mask))(keys))

    assert set(many(Discrete(4))) == {0, 1, 2, 3}
    assert {tuple(x) for x in many(MultiDiscrete((2, 2)))} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    box = many(Box(-2.0, 3.0, (1,)))
    assert box.min() < -1.9
    assert box.max() > 2.9
    assert many(Box(0, 3, (), np.uint8)).max() == 3
    assert set(many(Discrete(4), jnp.array([False, True, False, True]))) == {1, 3}
    masked = many(MultiDiscrete((2, 3)), jnp.array([False, True, True, False, True]))
    assert {tuple(x) for x in masked} == {(1, 0), (1, 2)}


def test_what_is_not_contained():
    box = Box(-1.2, 1.2, (2,))
    assert spaces.contains(box, jnp.array([1.2, -1.2]))  # bounds are compared in float32
    assert not spaces.contains(box, jnp.array([1.3, 0.0]))
    assert not spaces.contains(box, jnp.array([jnp.nan, 0.0]))
    assert not spaces.contains(box, jnp.zeros(3))
    assert not spaces.contains(box, jnp.zeros(2, jnp.int32))
    assert not spaces.contains(Discrete(3), jnp.int32(3))
    assert not spaces.contains({"arm": box}, (jnp.zeros(2),))


def test_unbounded_in_the_form_of_the_largest_float_is_sampled_near_zero():
    huge = float(np.finfo(np.float32).max)
    assert jnp.abs(spaces.sample(jax.random.key(0), Box(-huge, huge, (100,)))).max() < 10


def test_descriptions_for_people():
    space = {"arm": Box(-1, math.inf, (3,)), "grip": (Discrete(2), MultiDiscrete((2, 5)))}
    assert (
        spaces.describe(space)
        == "{'arm': Box float32 [3] in -1 … inf, 'grip': (Discrete 2, MultiDiscrete [2, 5])}"
    )


def test_errors_say_what_is_wrong():
    with pytest.raises(TypeError, match="a Box cannot be masked"):
        spaces.mask_space(Box(0, 1))
    with pytest.raises(TypeError, match="cannot describe a space of type str"):
        spaces.to_json("Discrete(2)")
    with pytest.raises(ValueError, match="unknown kind of space 'sphere'"):
        spaces.from_json({"sphere": 3})
