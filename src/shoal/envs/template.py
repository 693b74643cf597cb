"""The first env of a user: a small task that works, with its test, to be changed line by line."""

import importlib.util
import keyword
import sys
from pathlib import Path

from shoal.errors import ShoalError

ENV = '''"""Walk a point to the origin. Change Params, State, reset and step into your own task."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal import Box, Env, Step, as_arrays


class Params(NamedTuple):
    speed: float = 0.1  # knobs: set them with --env.speed 0.2


class State(NamedTuple):
    position: jax.Array  # [2]


def reset(key, params):
    position = jax.random.uniform(key, (2,), jnp.float32, -1, 1)
    return State(position), position


def step(key, state, action, params):
    position = jnp.clip(state.position + params.speed * jnp.clip(action, -1, 1), -1, 1)
    distance = jnp.hypot(position[0], position[1])
    return Step(State(position), position, -distance, distance < 0.1, jnp.bool_(False), {{}})


def make_env():
    return Env(
        name="{name}",
        default_params=lambda: as_arrays(Params()),
        reset=reset,
        step=step,
        obs_space=lambda params: Box(-1.0, 1.0, (2,)),
        action_space=lambda params: Box(-1.0, 1.0, (2,)),
        time_limit=100,  # steps, 0 = no limit
    )
'''

TEST = """import jax
import jax.numpy as jnp
from {name} import State, make_env

from shoal import check_env


def test_{name}_keeps_the_contract():
    report = check_env(make_env())
    assert report.ok, str(report)


def test_an_episode_ends_at_the_origin():
    env, key = make_env(), jax.random.key(0)
    step = env.step(key, State(jnp.array([0.15, 0.0])), jnp.array([-1.0, 0.0]), env.default_params())
    assert step.terminated
"""


def write_new_env(name: str, folder: str | Path = ".") -> tuple[Path, Path]:
    """Write `NAME.py` with `make_env()` and `test_NAME.py` into `folder`; return the two paths.

    Raises ShoalError if the name is no Python module name, and rather than overwrite a file.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ShoalError(
            f"{name!r} cannot be the name of a Python module", "use letters, digits and _, as in my_env"
        )
    if name in sys.stdlib_module_names or importlib.util.find_spec(name):
        raise ShoalError(f"{name} is the name of a module there is already", f"try {name}_env")
    paths = Path(folder) / f"{name}.py", Path(folder) / f"test_{name}.py"
    for path in paths:
        if path.exists():
            raise ShoalError(f"{path} exists already", "choose another name, or remove the file")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, (ENV, TEST)):
        path.write_text(text.format(name=name), encoding="utf-8")
    return paths
