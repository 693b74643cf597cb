"""The env a user starts from works as written."""

import os
import subprocess
import sys

import pytest

from shoal.envs.template import write_new_env
from shoal.errors import ShoalError


def test_the_written_test_passes(tmp_path):
    """Its test runs `check_env`; strictly, as ours do."""
    env, test = write_new_env("my_task", tmp_path / "new")
    assert (env.name, test.name) == ("my_task.py", "test_my_task.py")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(test)]
    quick = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    run = subprocess.run(command, cwd=env.parent, env=quick, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout


def test_nothing_is_overwritten(tmp_path):
    env, test = write_new_env("my_task", tmp_path)
    env.unlink()
    test.write_text("mine")
    with pytest.raises(ShoalError, match=r"test_my_task\.py exists already"):
        write_new_env("my_task", tmp_path)
    assert test.read_text() == "mine"
    assert not env.exists()


@pytest.mark.parametrize("name", ["my-task", "2d", "", "class", "../up"])
def test_names_are_module_names(name, tmp_path):
    with pytest.raises(ShoalError, match="cannot be the name of a Python module"):
        write_new_env(name, tmp_path)
    assert not list(tmp_path.iterdir())
