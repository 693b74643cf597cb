"""`shoal warm` compiles what `shoal train` then finds; what comes before training is kept and told."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from shoal.app import session, warmstart
from shoal.app.assembly import assemble
from shoal.app.config import OutputConfig, resolve
from shoal.errors import ShoalError
from shoal.training import events

SMALL = {"agents": 3, "steps": 300, "eval_episodes": 4, "chunk": 3, "devices": 2}
PPO = {"num_envs": 2, "num_steps": 32, "minibatches": 2, "epochs": 2, "hidden": (8,)}
NORMALISING = {"ppo": PPO | {"normalize_obs": True, "normalize_reward": True}}
TINY = (
    *("cartpole", "--agents", "2", "--steps", "64", "--eval-episodes", "4", "--warmup-steps", "64"),
    *("--ppo.num_envs", "2", "--ppo.num_steps", "16", "--ppo.minibatches", "1", "--ppo.epochs", "1"),
    *("--ppo.hidden", "4", "--ppo.normalize_obs"),
)


def output(path, **given):
    return OutputConfig(root=str(path), report=False, quiet=True, **given)


def state_of(run):
    """The newest checkpoint."""
    made = assemble(resolve({}, file=run.folder.config))
    return jax.device_get(session.restored(made, run.folder)[0])


def shoal(*words, cwd):
    """A process of its own, with an empty cache there."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cwd)}
    code = """
import sys, jax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
from shoal.app.main import main
code = main(sys.argv[1:])
print(sum(name.endswith("cache_misses") for name in hits), file=sys.stderr)
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), int(done.stderr.splitlines()[-1])


def test_after_warm_no_program_of_training_is_compiled_again(tmp_path):
    warmed, misses = shoal("warm", *TINY, "--quiet", "--json", cwd=tmp_path)
    assert misses >= 4  # start, warm-up, training and evaluation
    assert warmed["again_s"] < warmed["compile_s"]
    again, misses = shoal("warm", *TINY, "--quiet", "--json", cwd=tmp_path)
    assert misses == 0
    assert again["compile_s"] < warmed["compile_s"]
    assert not list(tmp_path.glob("runs/*"))


def test_a_warm_up_is_recorded_and_a_resume_does_not_repeat_it(tmp_path):
    heard = []
    settings = resolve(SMALL | {"warmup_steps": 100}, NORMALISING)
    whole = session.train(settings, output(tmp_path, out=str(tmp_path / "whole")), heard.append)
    assert whole.manifest["warm_start"] == {"warmup_env_steps": 128}  # rounded up to whole rollouts
    (plan,) = (event for event in heard if isinstance(event, events.Planned))
    assert any("128 env steps per agent fill the statistics" in note for note in plan.notes)
    ended = state_of(whole)
    assert (ended.learner.obs_moments.count == 128 + 320).all()
    os.rename(whole.folder.checkpoints / "5", tmp_path / "away")  # as if killed right after the start
    kept = {name: fact for name, fact in whole.manifest.items() if name not in ("finished", "result")}
    whole.folder.manifest.write_text(json.dumps(kept))
    again = session.resume(whole.path, output=output(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, state_of(again), ended)
    assert again.manifest["warm_start"] == {"warmup_env_steps": 128}


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_warm_up_without_statistics_is_refused(algo):
    with pytest.raises(ShoalError, match="has nothing to fill"):
        warmstart.Preparation(assemble(resolve(SMALL | {"algo": algo, "warmup_steps": 100})))
