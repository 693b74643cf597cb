"""What a user's own network gets wrong is told with what was expected and what came."""

import jax.numpy as jnp
import pytest

from shoal.errors import ShoalError
from shoal.nets import house_net
from shoal.nets.check import checked
from shoal.types import Box, Discrete

SPACE = {"a": Box(-1.0, 1.0, (3,)), "b": Discrete(4)}


def init(key):
    return {"w": jnp.zeros((3, 2))}


def apply(params, obs):
    return obs["a"] @ params["w"]


def made(make):
    return checked(make, "mine:make", lambda error: f"{type(error).__name__}: {error}")(SPACE, 2, 1.0)


def test_a_right_network_passes_as_it_is():
    assert made(lambda *_: (init, apply)) == (init, apply)
    assert made(lambda *_: [init, apply]) == (init, apply)
    made(house_net("auto", (8,), "tanh"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda *_: None, "expected two functions (init, apply), got None"),
        (lambda *_: (init,), "got a tuple of function"),
        (lambda *_: ({}, apply), "got a tuple of dict, function"),
        (lambda space: (init, apply), "make(obs_space, outputs, scale) failed: TypeError"),
        (lambda *_: (lambda: (), apply), "init(key) failed: TypeError"),
        (
            lambda *_: (lambda key: {"w": jnp.zeros((3, 2), jnp.int32)}, apply),
            "init(key)['w']: expected float32",
        ),
        (lambda *_: (init, lambda params, obs: obs["c"]), "apply(params, obs) failed: KeyError"),
        (lambda *_: (init, lambda params: 0), "apply(params, obs) failed: TypeError"),
        (
            lambda *_: (init, lambda params, obs: obs["a"][:, :1]),
            "expected float32 [2, 2], got float32 [2, 1]",
        ),
        (lambda *_: (init, lambda params, obs: obs["b"][:, None] * jnp.ones(2, int)), "got int32 [2, 2]"),
        (
            lambda *_: (init, lambda params, obs: apply(params, obs).astype(jnp.bfloat16)),
            "apply(params, obs) of 2 observations: expected float32 [2, 2], got bfloat16 [2, 2]",
        ),
        (lambda *_: (init, lambda params, obs: (obs["a"],)), "got a tuple of ShapeDtypeStruct"),
        (lambda *_: (init, lambda params, obs: None), "got None"),
    ],
)
def test_a_wrong_network_is_told(make, said):
    with pytest.raises(ShoalError) as error:
        made(make)
    assert error.value.message.startswith("mine:make: ")
    assert said in error.value.message
