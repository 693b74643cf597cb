"""The Python API: functions as envs, and what it refuses."""

import sys

import pytest

import shoal
from shoal.app import catalogue

SMALL = dict(
    agents=2,
    steps=100,
    eval_episodes=4,
    quiet=True,
    report=False,
    ppo={"num_envs": 2, "num_steps": 16, "hidden": (8,), "minibatches": 2},
)


def make_env():
    return shoal.make_env("cartpole")


def test_a_function_is_an_env_and_is_recorded_by_its_path(tmp_path):
    run = shoal.train(make_env, root=tmp_path, **SMALL)
    assert run.result["env"] == f"{__name__}:make_env"
    longer = shoal.resume(run.path, steps=200, quiet=True, report=False)
    assert longer.result["env_steps_per_agent"] == 224
    assert longer.best().act([0.0, 0.0, 0.0, 0.0]) in (0, 1)


def test_a_function_that_cannot_be_found_again_is_refused(tmp_path):
    with pytest.raises(shoal.ShoalError, match="lambda"):
        shoal.train(lambda: make_env(), root=tmp_path, **SMALL)


def test_a_script_without_a_main_guard_does_not_train_twice(tmp_path, monkeypatch):
    (tmp_path / "unguarded.py").write_text("import shoal\nshoal.train(quiet=True)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(shoal.ShoalError, match="starts a training of its own") as error:
        catalogue.load_env("unguarded:make_env")
    assert "__main__" in error.value.hint
    sys.modules.pop("unguarded", None)


def test_an_env_of_another_session_says_so():
    with pytest.raises(shoal.ShoalError, match="not this one"):
        catalogue.load_env("__main__:nothing_of_this_name")


def test_a_file_name_is_no_module():
    with pytest.raises(shoal.ShoalError) as error:
        catalogue.load_env("walk.py:make_env")
    assert "walk:make_env" in error.value.hint


def test_knobs_and_env_params_reach_the_run(tmp_path):
    run = shoal.train("cartpole", env_params={"gravity": 5}, root=tmp_path, **SMALL)
    assert "gravity = 5" in run.folder.config.read_text()
    assert run.policy("all").contract["env_params"] == {"gravity": 5}


def test_an_unknown_setting_names_the_nearest(tmp_path):
    with pytest.raises(shoal.ShoalError) as error:
        shoal.train("cartpole", root=tmp_path, agnets=3, quiet=True)
    assert "agents" in error.value.hint
