"""A network maker of the user's own, checked as it makes each network: what was expected, what came."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shoal.errors import ShoalError
from shoal.nets import NetMaker
from shoal.types import Net, Space, is_space

ROWS = 2  # more than one, so that a lost batch axis shows


def checked(make: NetMaker, name: str, describe: Callable[[Exception], str]) -> NetMaker:
    """`make`, but ShoalError where a network of its is none; only shapes are looked at, nothing is run.

    `name` is what the user calls it; `describe` tells an exception, best with its place in the user's code.
    """

    def attempt(what: str, function: Callable, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ShoalError:
            raise
        except Exception as error:
            raise ShoalError(f"{name}: {what} failed: {describe(error)}", HINT) from error

    def expect(holds: bool, what: str, expected: str, got: str) -> None:
        if not holds:
            raise ShoalError(f"{name}: {what}: expected {expected}, got {got}", HINT)

    def checked_make(obs_space: Space, outputs: int, scale: float) -> Net:
        made = attempt("make(obs_space, outputs, scale)", make, obs_space, outputs, scale)
        pair = isinstance(made, tuple | list) and len(made) == 2 and all(map(callable, made))
        expect(pair, "make(obs_space, outputs, scale)", "two functions (init, apply)", _kind(made))
        init, apply = made
        params = attempt("init(key)", jax.eval_shape, init, jax.random.key(0))
        for path, leaf in jax.tree.leaves_with_path(params):
            where = f"init(key){jax.tree_util.keystr(path)}"
            expect(leaf.dtype == jnp.float32, where, "float32", _spec(leaf))
        batch = lambda leaf: jax.ShapeDtypeStruct((ROWS, *leaf.shape), leaf.dtype)
        obs = jax.tree.map(batch, obs_space, is_leaf=is_space)
        given = attempt("apply(params, obs)", jax.eval_shape, apply, params, obs)
        what, wanted = f"apply(params, obs) of {ROWS} observations", f"float32 [{ROWS}, {outputs}]"
        expect(_spec(given) == wanted, what, wanted, _spec(given))
        return Net(init, apply)

    return checked_make


HINT = "make(obs_space, outputs, scale) -> (init, apply): see Net in shoal.types"


def _spec(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if hasattr(x, "shape") else _kind(x)


def _kind(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {', '.join(type(part).__name__ for part in x) or 'nothing'}"
    return "None" if x is None else f"a {type(x).__name__}"
