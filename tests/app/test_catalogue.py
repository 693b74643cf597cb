import sys

import pytest

from shoal.app import catalogue
from shoal.errors import ShoalError
from shoal.types import Env

MINE = """
from shoal.envs import cartpole
def make():
    return cartpole.make()._replace(name="mine")
class Bare:
    name = "bare"
def bare():
    return Bare()
def broken():
    return 1 / 0
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working folder with modules of a user's own, forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_env.py").write_text(MINE)
    (tmp_path / "my_broken.py").write_text("import math\n\nmath.nothing\n")
    (tmp_path / "my_typo.py").write_text("def make(:\n")
    yield tmp_path
    for name in ("my_env", "my_broken", "my_typo"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", catalogue.ENVS)
def test_every_short_name_gives_an_env(name):
    env = catalogue.load_env(name)
    assert isinstance(env, Env)
    assert env.name == name


def test_an_env_of_the_working_folder_is_found():
    assert catalogue.load_env("my_env:make").name == "mine"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("cartpol", "did you mean cartpole?"),
        ("gymnax:CartPole-v1", "shoal env new NAME"),
        ("my_env:mak", "did you mean make?"),
        ("my_env:bare", "without default_params, reset, step"),
        ("my_env:broken", "my_env.py:10"),
        ("my_broken:make", "my_broken.py:3"),
        ("my_typo:make", "my_typo.py:1"),
        ("no_such_module:make", "no module no_such_module"),
    ],
)
def test_what_gives_no_env_says_why(spec, said):
    with pytest.raises(ShoalError) as caught:
        catalogue.load_env(spec)
    assert said in str(caught.value)


def test_a_module_that_misses_another_is_not_called_missing(here):
    (here / "my_broken.py").write_text("import no_such_thing\n")
    with pytest.raises(ShoalError, match=r"my_broken failed.*no_such_thing.*my_broken\.py:1"):
        catalogue.load_env("my_broken:make")


def test_an_algorithm_lacks_nothing():
    assert catalogue.load_algo("ppo").make
    with pytest.raises(ShoalError, match="did you mean ppo"):
        catalogue.load_algo("pop")
    with pytest.raises(ShoalError, match="lacks Knobs, Sizes, make"):
        catalogue.load_algo("os.path")


def test_a_network_is_a_function():
    assert callable(catalogue.load_net("my_env:make"))
    with pytest.raises(ShoalError, match="module:make"):
        catalogue.load_net("mpl")


@pytest.mark.parametrize("name", catalogue.ALGOS)
def test_every_knob_has_a_range_that_holds_its_default(name):
    algo = catalogue.load_algo(name)
    knobs = algo.Knobs()._asdict()
    assert set(algo.RANGES) == set(knobs)
    assert all(low <= knobs[name] <= high for name, (low, high) in algo.RANGES.items())
