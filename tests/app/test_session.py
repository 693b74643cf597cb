"""Whole runs, small: what is on disk, and that interrupting one changes nothing."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from shoal.app import afterwards, policies, session
from shoal.app.assembly import assemble
from shoal.app.config import OutputConfig, resolve
from shoal.app.run import Run
from shoal.errors import ShoalError
from shoal.runs import checkpoints
from shoal.runs.metrics import read_rows
from shoal.training import events, program

SMALL = {"agents": 3, "steps": 3000, "eval_episodes": 8, "chunk": 3, "devices": 2}
PPO = {"ppo": {"num_envs": 2, "num_steps": 32, "minibatches": 2, "epochs": 2, "hidden": (8,)}}
PRIORITISED = {"prioritised": True, "n_step": 2, "target_every": 30}
ALL = {"ppo": PPO["ppo"] | {"normalize_obs": True, "normalize_reward": True}}


def settings(dotted=PPO, **flat):
    return resolve(SMALL | flat, dotted)


def trained(path, listen=lambda event: None, hook=None, dotted=PPO, **flat) -> Run:
    output = OutputConfig(out=str(path), root=str(path.parent), report=False, quiet=True)
    run = session.train(settings(dotted, **flat), output, listen, hook)
    assert run is not None
    return run


def interrupted(path, at: int, **given) -> Run:
    """A run stopped by a signal once `at` updates are done."""

    def hook(progress, state):
        if progress.updates >= at:
            os.kill(os.getpid(), signal.SIGINT)

    run = trained(path, hook=hook, **given)
    assert not run.finished
    return run


def quiet(path) -> OutputConfig:
    return OutputConfig(root=str(path), report=False, quiet=True)


def states(run: Run):
    """The newest checkpoint, as arrays by path."""
    made = assemble(resolve({}, file=run.folder.config))
    state, tally, _ = session.restored(made, run.folder)
    return jax.device_get(state), tally


def same_bits(a, b):
    rows_a, rows_b = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
    for (path, x), (_, y) in zip(rows_a, rows_b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "whole")


def test_a_run_leaves_all_its_files(run):
    names = {path.name for path in run.path.iterdir()}
    assert {"manifest.json", "config.toml", "metrics.jsonl", "eval.jsonl", "checkpoints", "policy"} <= names
    assert run.finished
    assert run.returns.shape == (3,)
    assert run.result["env_steps"] == 3 * run.result["env_steps_per_agent"] == 3 * 3008
    assert run.manifest["steps_asked"] == 3000


def test_every_chunk_has_a_row_per_agent(run):
    rows = run.metrics()
    assert len(rows["agent"]) == 3 * len(np.unique(rows["updates"]))
    assert rows["env_steps"].max() == 3008
    assert set(rows["agent"]) == {0, 1, 2}


@pytest.mark.parametrize(
    "env", ["cartpole", "acrobot", "mountaincar", "mountaincar-continuous", "pendulum", "breakout"]
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, env):
    given = dict(env=env, steps=700, dotted=ALL)
    whole = trained(tmp_path / "whole", **given)
    half = interrupted(tmp_path / "half", at=5, **given)
    assert states(half)[1].updates < states(whole)[1].updates
    done = session.resume(half.path, output=quiet(tmp_path))
    same_bits(states(whole)[0], states(done)[0])
    assert done.result["returns"] == whole.result["returns"]
    assert read_rows(done.folder.metrics)["updates"].tolist() == whole.metrics()["updates"].tolist()


@pytest.mark.parametrize(("algo", "env", "more"), [("sac", "pendulum", {}), ("dqn", "cartpole", PRIORITISED)])
def test_a_resumed_replay_has_the_bits_of_an_uninterrupted_one(tmp_path, algo, env, more):
    """Stopped after the ring of 64 steps has wrapped around, before it does so again."""
    sizes = dict(num_envs=2, num_steps=2, minibatches=2, batch_size=8, buffer_size=64, learning_starts=40)
    given = dict(env=env, algo=algo, steps=300, dotted={algo: sizes | more | {"hidden": (8,)}})
    whole = trained(tmp_path / "whole", **given)
    half = interrupted(tmp_path / "half", at=25, **given)
    assert 25 <= states(half)[1].updates < states(whole)[1].updates
    done = session.resume(half.path, output=quiet(tmp_path))
    same_bits(states(whole)[0], states(done)[0])
    assert done.result["returns"] == whole.result["returns"]


@pytest.mark.parametrize(
    ("algo", "sizes"), [("rppo", {"units": 4, "minibatches": 2}), ("es", {}), ("pqn", {})]
)
def test_a_resumed_memory_has_the_bits_of_an_uninterrupted_one(tmp_path, algo, sizes):
    """Stopped in the middle of episodes: states, perturbations and unfinished returns go on."""
    sizes = sizes | {"num_envs": 4, "num_steps": 8, "hidden": (8,)}
    given = dict(algo=algo, steps=400, dotted={algo: sizes})
    whole = trained(tmp_path / "whole", **given)
    half = interrupted(tmp_path / "half", at=5, **given)
    done = session.resume(half.path, output=quiet(tmp_path))
    same_bits(states(whole)[0], states(done)[0])
    assert done.result["returns"] == whole.result["returns"]


def test_rows_beyond_the_checkpoint_are_cut(tmp_path):
    half = interrupted(tmp_path / "half", at=5)
    at = states(half)[1].updates
    with open(half.folder.metrics, "a") as file:
        file.write(json.dumps({"updates": at + 3, "agent": 0, "env_steps": 1}) + '\n{"updates": 9')
    done = session.resume(half.path, output=quiet(tmp_path))
    rows = done.metrics()
    assert len(rows["agent"]) == 3 * len(np.unique(rows["updates"]))


@pytest.mark.parametrize("change", [{"devices": 1}, {"devices": 3}, {"devices": 4, "mesh": "agent=2,data=2"}])
def test_a_run_goes_on_on_another_number_of_devices(tmp_path, change):
    whole = trained(tmp_path / "whole", steps=500)
    half = interrupted(tmp_path / "half", at=4, steps=500)
    done = session.resume(half.path, change, quiet(tmp_path))
    if "mesh" in change:
        assert done.manifest["resumed"][0]["mesh"] == {"agent": 2, "data": 2}
    ours, theirs = (
        load_file(done.folder.policy / policies.WEIGHTS),
        load_file(whole.folder.policy / policies.WEIGHTS),
    )
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], atol=1e-4, err_msg=name)


def test_one_agent_over_two_devices_is_one_agent(tmp_path):
    one = trained(tmp_path / "one", agents=1, devices=1, steps=200)
    two = trained(tmp_path / "two", agents=1, devices=2, steps=200)
    assert two.manifest["mesh"] == {"agent": 1, "data": 2}
    ours, theirs = (load_file(r.folder.policy / policies.WEIGHTS) for r in (one, two))
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], atol=1e-4, err_msg=name)


def test_an_agent_is_the_same_alone_and_among_others(tmp_path):
    few = trained(tmp_path / "few", agents=1, devices=1, steps=200)
    many = trained(tmp_path / "many", agents=5, devices=1, steps=200)
    ours, theirs = (load_file(r.folder.policy / policies.WEIGHTS) for r in (few, many))
    for name, array in ours.items():
        np.testing.assert_allclose(array[0], theirs[name][0], atol=1e-4, err_msg=name)


def test_longer_training_goes_on_from_the_end_and_says_what_annealing_does(run, tmp_path):
    first = trained(tmp_path / "first", steps=640)
    first.folder.metrics.unlink()
    heard = []
    longer = session.resume(first.path, changes={"steps": 1280}, output=quiet(tmp_path), listen=heard.append)
    assert longer.result["env_steps_per_agent"] == 1280
    (plan,) = (event for event in heard if isinstance(event, events.Planned))
    assert any("of which 50% is spent" in note for note in plan.notes)
    assert any("metrics.jsonl is gone" in note for note in plan.notes)
    with pytest.raises(ShoalError, match="more than --steps 640"):
        session.resume(first.path, changes={"steps": 640}, output=quiet(tmp_path))


def test_a_finished_run_is_left_alone(run):
    before = run.folder.manifest.read_bytes()
    session.resume(run.path, output=quiet(run.path.parent))
    assert run.folder.manifest.read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    whole = trained(tmp_path / "whole", steps=300)
    half = interrupted(tmp_path / "half", at=1, steps=300)
    for step in checkpoints.steps(half.folder.checkpoints):
        os.rename(half.folder.checkpoints / str(step), tmp_path / f"away-{step}")
    done = session.resume(half.path, output=quiet(tmp_path))
    same_bits(states(whole)[0], states(done)[0])


KILLED = """
import sys
from shoal.app.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_killed_at_a_random_moment_has_the_same_policy_after_resume(tmp_path):
    command = [sys.executable, "-c", KILLED, "train", "cartpole", "--agents", "2", "--steps", "40000"]
    command += ["--chunk", "2", "--checkpoint-every", "0.2", "--no-report", "--quiet", "--devices", "2"]
    command += ["--ppo.hidden", "8", "--eval-episodes", "4"]
    whole = trained(
        tmp_path / "whole",
        dotted={"ppo": {"hidden": (8,)}},
        agents=2,
        steps=40000,
        chunk=2,
        eval_episodes=4,
    )
    path = tmp_path / "killed"
    process = subprocess.Popen([*command, "--out", str(path), "--root", str(tmp_path)])
    try:
        deadline = time.monotonic() + 120
        while not checkpoints.steps(path / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(float(np.random.default_rng().uniform(0, 0.5)))  # any moment must do
    finally:
        process.kill()
        process.wait(30)
    done = session.resume(path, output=quiet(tmp_path))
    ours, theirs = (load_file(r.folder.policy / policies.WEIGHTS) for r in (done, whole))
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def test_evaluation_writes_nothing_and_repeats_the_score(run):
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    row = afterwards.evaluate(run.path)
    assert row["returns"] == run.result["returns"]
    after = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    assert {p for p in after if after[p] != before.get(p)} <= {run.path / ".lock"}


def test_a_served_population_acts_as_in_training(run):
    made = assemble(resolve({}, file=run.folder.config))
    state, _, _ = session.restored(made, run.folder)
    obs = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    served = run.policy("all").act(obs)
    learner = jax.tree.map(lambda x: x[:3], state.learner)
    act = lambda learner, obs: made.agent.act(made.agent.policy(learner), (), obs, None, None)[1]
    np.testing.assert_array_equal(served, jax.vmap(act)(learner, obs))
    for i in range(3):
        one = run.policy(i)
        np.testing.assert_array_equal(one.act(obs[i]), served[i])
        assert one.act(obs[i, 0]) == served[i, 0]


def test_best_median_and_worst_are_those_of_the_evaluation(run):
    assert run.best().returns == (max(run.result["returns"]),)
    assert run.policy("worst").returns == (min(run.result["returns"]),)
    with pytest.raises(ShoalError, match="no agent"):
        run.policy(17)


def test_a_wrong_observation_is_refused_with_what_fits(run):
    with pytest.raises(ShoalError, match=r"\[\(3,\)\].*Box float32 \[4\]"):
        run.best().act(np.zeros(3, np.float32))


def test_an_exported_policy_acts_alike_and_nothing_is_overwritten(run, tmp_path):
    out = afterwards.export(run.path, tmp_path / "out", "best")
    obs = np.ones((6, 4), np.float32)
    np.testing.assert_array_equal(policies.load(out).act(obs), run.best().act(obs))
    assert policies.load(out).agents == run.best().agents
    with pytest.raises(ShoalError, match="not empty"):
        afterwards.export(run.path, tmp_path / "out")


def test_a_stopped_run_can_be_exported(tmp_path):
    half = interrupted(tmp_path / "half", at=2)
    out = afterwards.export(half.path, tmp_path / "out")
    assert len(policies.load(out, "all").agents) == 3


def test_play_makes_a_film(run, tmp_path):
    film = afterwards.play(run.path, "best", out=tmp_path / "film")
    assert film.stat().st_size > 1000


def test_each_program_is_compiled_once(tmp_path, monkeypatch):
    compiled = []
    for name in ("compile_init", "compile_chunk", "compile_evaluation"):
        original = getattr(program, name)
        count = lambda *args, name=name, original=original: (compiled.append(name), original(*args))[1]
        monkeypatch.setattr(program, name, count)
    traces = []
    made = assemble(settings())
    update = program.one_update.update
    monkeypatch.setattr(
        program.one_update, "update", lambda *args, **kw: (traces.append(1), update(*args, **kw))[1]
    )
    trained(tmp_path / "run", eval_every=640)
    assert made is not None
    assert sorted(compiled) == ["compile_chunk", "compile_evaluation", "compile_init"]
    assert len(traces) <= 3  # eval_shape, the loop's body, and its shapes: all of one compile


def test_the_best_checkpoint_is_kept(tmp_path):
    run = trained(tmp_path / "run", eval_every=320, keep=1)
    _, tally = states(run)
    assert tally.best_updates in checkpoints.steps(run.folder.checkpoints)


def test_a_diverged_agent_is_frozen_and_named_and_the_run_ends_well(tmp_path):
    heard = []

    def hook(progress, state):
        if progress.updates == 3:
            lr = np.asarray(state.learner.knobs.lr).copy()
            lr[1] = np.inf
            knobs = state.learner.knobs._replace(lr=jax.device_put(lr, state.learner.knobs.lr.sharding))
            return state._replace(learner=state.learner._replace(knobs=knobs))
        return None

    run = trained(tmp_path / "run", heard.append, hook)
    assert [event.agent for event in heard if isinstance(event, events.Diverged)] == [1]
    assert run.result["alive"] == 2


def test_a_seed_changes_the_result_and_the_same_seed_does_not(tmp_path):
    weights = [
        load_file(trained(tmp_path / name, seed=seed, steps=100).folder.policy / policies.WEIGHTS)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    key = "actor/0/weight"
    np.testing.assert_array_equal(weights[0][key], weights[1][key])
    assert (weights[0][key] != weights[2][key]).any()


def test_a_time_limit_of_ones_own_holds(tmp_path):
    run = trained(tmp_path / "run", env="pendulum", time_limit=20, steps=300)
    assert np.nanmax(run.metrics()["length_mean"]) == 20


def test_settings_that_do_not_divide_say_what_would():
    with pytest.raises(ShoalError) as error:
        dataclasses.replace(assemble(settings()).sizes, minibatches=5)
    assert "64 is not divisible by minibatches = 5" in error.value.message
    assert "4" in error.value.hint


def test_a_hook_that_raises_loses_nothing(tmp_path):
    def hook(progress, state):
        if progress.updates >= 6:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(tmp_path / "run", hook=hook)
    whole = trained(tmp_path / "whole")
    done = session.resume(tmp_path / "run", output=quiet(tmp_path))
    same_bits(states(whole)[0], states(done)[0])


def test_what_a_hook_returns_must_be_a_state(tmp_path):
    with pytest.raises(ShoalError, match="the hook returned str"):
        trained(tmp_path / "run", hook=lambda progress, state: "yes")


def test_a_signal_while_compiling_stops_before_there_is_a_run(tmp_path):
    def listen(event):
        if isinstance(event, events.Compiling):
            os.kill(os.getpid(), signal.SIGTERM)

    output = OutputConfig(out=str(tmp_path / "run"), root=str(tmp_path), report=False, quiet=True)
    assert session.train(settings(), output, listen) is None
    assert not (tmp_path / "run").exists()


def test_a_signal_during_the_last_evaluation_keeps_the_trained_state(tmp_path):
    def listen(event):
        if event == events.Compiling("evaluation"):
            os.kill(os.getpid(), signal.SIGTERM)

    whole = trained(tmp_path / "whole")
    run = trained(tmp_path / "run", listen)
    assert not run.finished
    same_bits(states(whole)[0], states(run)[0])
    done = session.resume(run.path, output=quiet(tmp_path))
    assert done.result["returns"] == whole.result["returns"]
    assert len(read_rows(done.folder.eval)["agent"]) == 3


def test_a_finished_run_that_goes_on_and_is_stopped_is_unfinished(tmp_path):
    run = trained(tmp_path / "run", steps=320)

    def hook(progress, state):
        os.kill(os.getpid(), signal.SIGINT)

    again = session.resume(run.path, {"steps": 3200}, quiet(tmp_path), hook=hook)
    assert not again.finished
    assert not again.result
    assert not again.folder.policy.exists()
    assert session.resume(run.path, output=quiet(tmp_path)).result["env_steps_per_agent"] == 3200


def test_more_steps_lift_the_old_stopping_rule(tmp_path):
    run = trained(tmp_path / "run", stop_at=1.0)
    assert run.result["stopped_early"]
    done = session.resume(run.path, {"steps": 1280}, quiet(tmp_path))
    assert done.result["env_steps_per_agent"] == 1280
    assert done.result["stopped_early"] is None


def test_a_film_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError("no canvas")

    monkeypatch.setattr(session.video, "film", broken)
    output = OutputConfig(out=str(tmp_path / "run"), root=str(tmp_path), report=True, quiet=True)
    run = session.train(settings(steps=100), output)
    assert run.finished
    assert (run.path / "report.html").exists()
    assert "no film: ZeroDivisionError: no canvas" in caplog.text


def test_another_evaluation_seed_plays_other_episodes(run):
    assert afterwards.evaluate(run.path, seed=1)["returns"] != run.result["returns"]


def test_numpy_and_lists_in_give_numpy_out(run):
    best = run.best()
    for obs in (np.zeros(4), [0.0, 0.0, 0.0, 0.0]):
        action = best.act(obs)
        assert isinstance(action, np.ndarray | np.generic)
        assert action.shape == ()
    assert isinstance(best.act(jax.numpy.zeros(4)), jax.Array)


def test_a_few_agents_are_served_together(run):
    few = policies.load(run.path, [2, 0])
    assert few.agents == (2, 0)
    assert few.act(np.zeros((2, 5, 4), np.float32)).shape == (2, 5)


def test_the_log_tells_what_happened(tmp_path):
    run = trained(tmp_path / "run", eval_every=640)
    text = (run.path / "log.txt").read_text()
    assert "evaluated at" in text
    assert "saved at update" in text


def test_a_profile_names_the_rollouts_share(tmp_path):
    output = OutputConfig(out=str(tmp_path / "run"), root=str(tmp_path), report=False, profile=True)
    run = session.train(settings(steps=1000), output)
    split = run.manifest["time_split"]
    assert split["rollout"] > 0
    assert split["train"] >= 0
    assert list((run.path / "profile").rglob("*.xplane.pb"))
