"""Every example runs, at a size for tests."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_first_run(tmp_path):
    run = importlib.import_module("01_first_run").main(agents=3, steps=4000, root=tmp_path)
    assert run.returns.shape == (3,)


def test_own_env_learns_to_stay_near_the_goal(tmp_path):
    run = importlib.import_module("02_own_env").main(agents=2, steps=30_000, root=tmp_path)
    assert run.returns.mean() > 35  # of at most 50; a random walk gets about 20


@pytest.mark.parametrize("make", ["make_plain", "make_flax"])
def test_own_network(tmp_path, make):
    example = importlib.import_module("03_own_network")
    run = example.main(getattr(example, make), agents=2, steps=20_000, root=tmp_path)
    assert run.returns.mean() > 40  # a random policy gets about 22


def test_functional_core():
    returns = importlib.import_module("04_functional_core").main(agents=2, updates=20)
    assert returns.shape == (2,)
    assert returns.max() > 40  # a random policy gets about 22
