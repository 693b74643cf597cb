"""Searches as whole runs, small: their files, their rows, and that interrupting one changes nothing."""

import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from shoal.app import afterwards, past, policies, programs, session, watch
from shoal.app.assembly import assemble
from shoal.app.config import OutputConfig, resolve
from shoal.app.main import main
from shoal.app.run import Run
from shoal.errors import ShoalError
from shoal.runs import folder
from shoal.runs.metrics import read_rows
from shoal.training import events

SMALL = {"agents": 6, "steps": 1600, "eval_episodes": 4, "chunk": 7, "devices": 2, "env": "cartpole"}
PPO = {"ppo": {"num_envs": 2, "num_steps": 16, "minibatches": 2, "epochs": 1, "hidden": (8,), "lr": 1e-2}}
SWEEP = ("ppo.lr=log:1e-4..1e-1", "ppo.clip=0.1,0.2")
SEARCHES = {"pbt": dict(pbt=True, pbt_every=5), "halving": dict(halving=True)}


def output(path, **changed):
    given = {"out": str(path), "root": str(path.parent), "report": False, "quiet": True}
    return OutputConfig(**given | changed)


def trained(path, hook=None, listen=lambda event: None, ppo=PPO["ppo"], **flat) -> Run:
    settings = resolve(SMALL | {"sweep": SWEEP} | flat, {"ppo": ppo})
    run = programs.train(settings, output(path), listen, hook)
    assert run is not None
    return run


def interrupted(path, at, **flat):
    def hook(progress, state):
        if progress.updates >= at:
            os.kill(os.getpid(), signal.SIGINT)

    run = trained(path, hook, **flat)
    assert not run.finished
    return run


def state(run):
    made = assemble(resolve({}, file=run.folder.config))
    return jax.device_get(session.restored(made, run.folder)[0])


def same(a, b):
    rows = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    for (path, x), y in rows:
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module", params=SEARCHES)
def search(request, tmp_path_factory):
    return request.param, trained(tmp_path_factory.mktemp("runs") / "whole", **SEARCHES[request.param])


def test_every_row_has_the_knobs_in_force_and_every_replacement_has_one(search):
    kind, run = search
    rows, replaced = run.metrics(), read_rows(run.folder.lineage)
    assert len(rows["agent"]) == 6 * len(np.unique(rows["updates"]))
    assert len(replaced["agent"])
    assert set(replaced["updates"]) <= set(rows["updates"])
    for when, agent, lr in zip(*(replaced[name] for name in ("updates", "agent", "ppo.lr"))):
        later = (rows["agent"] == agent) & (rows["updates"] > when)
        assert rows["ppo.lr"][later][0] == lr
    assert np.isnan(replaced["parent"].astype(float)).all() == (kind == "halving")
    assert run.result["varied"].keys() == {"ppo.lr", "ppo.clip"}
    assert run.result["env_steps"] == 6 * 1600
    assert run.result["agent_ids"] == list(policies.load(run.path, "all").agents)


def test_halving_gives_lanes_to_new_agents_that_count_their_own_steps(search):
    kind, run = search
    if kind == "pbt":
        assert run.result["agent_ids"] == list(range(6))
        return
    rows, replaced = run.metrics(), read_rows(run.folder.lineage)
    assert run.result["agent_ids"] != list(range(6))
    newcomers = replaced["agent"]
    assert newcomers.tolist() == list(range(6, 6 + len(newcomers)))
    for agent, when in zip(newcomers, replaced["updates"]):
        own = rows["agent"] == agent
        np.testing.assert_array_equal(rows["env_steps"][own], (rows["updates"][own] - when) * 32)
    for agent, when in zip(replaced["replaced"], replaced["updates"]):
        assert rows["updates"][rows["agent"] == agent].max() == when


def test_an_interrupted_search_goes_on_with_the_same_bits(search, tmp_path):
    kind, whole = search
    half = interrupted(tmp_path / "half", at=20, **SEARCHES[kind])
    done = programs.resume(half.path, None, output(tmp_path / "x", out=None))
    same(state(whole), state(done))
    assert done.result["returns"] == whole.result["returns"]
    for name in ("lineage", "metrics"):
        ours, theirs = (read_rows(getattr(run.folder, name)) for run in (done, whole))
        assert len(ours["agent"]) == len(theirs["agent"])
        np.testing.assert_array_equal(ours["agent"], theirs["agent"])
        np.testing.assert_array_equal(ours["ppo.lr"], theirs["ppo.lr"])


@pytest.mark.parametrize("devices", [1, 4])
def test_a_search_chooses_alike_on_any_number_of_devices(search, tmp_path, devices):
    """Identity of draws is exact; numbers agree to rounding, so choices do for these few updates."""
    kind, whole = search
    other = trained(tmp_path / "other", **SEARCHES[kind], devices=devices)
    ours, theirs = (read_rows(run.folder.lineage) for run in (other, whole))
    early = theirs["updates"] <= 10
    for name in ("agent", "replaced", "parent", "updates"):
        np.testing.assert_array_equal(ours[name][: early.sum()], theirs[name][early])
    np.testing.assert_allclose(ours["ppo.lr"][: early.sum()], theirs["ppo.lr"][early], rtol=1e-5)


def test_a_longer_search_goes_on_and_every_agent_s_budget_grows(search, tmp_path):
    kind, _ = search
    first = trained(tmp_path / "first", **SEARCHES[kind])
    before = state(first).identity.budget
    longer = programs.resume(first.path, {"steps": 2400}, output(tmp_path / "x", out=None))
    np.testing.assert_array_equal(state(longer).identity.budget, before + 25)
    assert longer.result["env_steps"] == 6 * 2400


def test_halving_ends_where_a_run_is_lengthened_and_says_so(tmp_path):
    first, heard = trained(tmp_path / "first", halving=True), []
    lineage = first.folder.lineage.read_text()
    programs.resume(first.path, {"steps": 2400}, output(tmp_path / "x", out=None), heard.append)
    assert first.folder.lineage.read_text() == lineage
    assert not [event for event in heard if isinstance(event, events.Selected)]
    plan = next(event for event in heard if isinstance(event, events.Planned))
    assert any("nobody is replaced any more" in note for note in plan.notes)


@pytest.mark.parametrize("search", [dict(pbt=True), dict(halving=True)])
def test_one_agent_cannot_be_compared(search, tmp_path):
    with pytest.raises(ShoalError, match="nobody to be compared with"):
        trained(tmp_path / "one", agents=1, **search)
    assert not (tmp_path / "one").exists()


# --- Several programs -------------------------------------------------------------------------


def test_programs_whose_agents_all_diverge_say_who(tmp_path):
    sweep = ("ppo.hidden=4;8",)
    run = trained(tmp_path / "lost", sweep=sweep, steps=320, agents=3, ppo=PPO["ppo"] | {"lr": 1e30})
    assert run.result["alive"] == 0
    assert run.result["diverged"] == ["0/0", "0/1", "1/0"]
    assert np.isfinite(run.result["env_steps_per_s"])


def test_a_part_that_cannot_be_made_is_refused_before_anything_trains(tmp_path):
    with pytest.raises(ShoalError, match="a cnn reads one or more images"):
        trained(tmp_path / "none", sweep=("net=mlp,cnn",), steps=320)
    assert not (tmp_path / "none").exists()


def test_a_resume_for_less_is_refused_and_changes_nothing(tmp_path):
    run = trained(tmp_path / "many", sweep=("ppo.hidden=4;8",), steps=320, agents=2)
    config = run.folder.config.read_text()
    with pytest.raises(ShoalError, match="more than --steps 64"):
        programs.resume(run.path, {"steps": 64}, output(tmp_path / "x", out=None))
    assert run.folder.config.read_text() == config


def test_a_part_that_was_killed_while_it_began_is_begun_again(tmp_path):
    run = trained(tmp_path / "many", sweep=("ppo.hidden=4;8",), steps=320, agents=2)
    part = run.path / "programs" / "1"
    for place in part.iterdir():
        if place.name != "config.toml":
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    again = programs.resume(run.path, {}, output(tmp_path / "x", out=None))
    assert again.result["agents"] == 2
    assert (part / "manifest.json").is_file()


def test_programs_run_one_after_the_other_and_are_announced(tmp_path):
    heard = []
    sweep = ("ppo.hidden=4;8,4", "ppo.lr=log:1e-4..1e-1")
    run = trained(tmp_path / "many", sweep=sweep, steps=320, agents=5, listen=heard.append)
    notes = [event.text for event in heard if isinstance(event, events.Note)]
    assert notes[0].startswith("2 programs to compile, one after the other: ppo.hidden=4 (3 agents)")
    compiled = [event.program for event in heard if isinstance(event, events.Compiled)]
    assert compiled.count("training") == 2
    assert run.finished
    assert [part.result["agents"] for part in run.programs] == [3, 2]
    assert run.result["returns"] == [x for part in run.programs for x in part.result["returns"]]
    assert run.result["env_steps"] == 5 * 320
    assert [row["program"] for row in run.result["programs"]] == ["ppo.hidden=4", "ppo.hidden=8,4"]
    assert run.best().returns[0] == run.returns.max()


def test_a_stopped_sweep_resumes_the_part_that_was_stopped_and_begins_the_rest(tmp_path):
    sweep = dict(sweep=("ppo.hidden=4;5;6",), agents=3, steps=640)
    whole = trained(tmp_path / "whole", **sweep)
    calls = []

    def hook(progress, state):
        calls.append(progress.updates)
        if len(calls) == 5:  # in the second program
            os.kill(os.getpid(), signal.SIGINT)

    half = trained(tmp_path / "half", hook, **sweep)
    assert not half.finished
    assert len(half.programs) == 2
    done = programs.resume(half.path, None, output(tmp_path / "x", out=None))
    assert done.finished
    assert done.result["returns"] == whole.result["returns"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """A finished sweep over shapes and a knob: programs of 3 and 2 agents."""
    sweep = ("ppo.hidden=4;8,4", "ppo.lr=log:1e-4..1e-1")
    run = trained(tmp_path_factory.mktemp("runs") / "shapes", sweep=sweep, steps=320, agents=5)
    return run, max(run.programs, key=lambda part: part.returns.max())


def test_the_best_of_a_sweep_over_shapes_is_loaded_exported_and_named(shapes, tmp_path):
    run, best = shapes
    best_agent = policies.load(best.path)
    loaded = policies.load(run.path)
    assert loaded.agents == best_agent.agents
    np.testing.assert_array_equal(loaded.returns, best.returns.max())
    exported = policies.load(afterwards.export(run.path, tmp_path / "policy"), "all")
    np.testing.assert_array_equal(exported.returns, best.returns)
    assert run.result["best_agent"] == f"{best.path.name}/{best_agent.agents[0]}"
    assert run.result["varied"]["ppo.hidden"] == ["4"] * 3 + ["8,4"] * 2
    lr = run.result["varied"]["ppo.lr"]
    assert lr[:2] == lr[3:]  # shapes are compared at the same draws of a knob
    with pytest.raises(ShoalError, match="each with agents of its own numbers") as error:
        policies.load(run.path, "all")
    assert str(run.programs[0].path) in error.value.hint


def test_a_sweep_over_shapes_is_evaluated_and_read_as_a_whole(shapes):
    run, _ = shapes
    row = afterwards.evaluate(run.path)
    assert row["returns"] == run.result["returns"]
    assert row["agents"] == 5
    rows = run.metrics()
    assert sorted(set(zip(rows["program"], rows["agent"]))) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_a_program_goes_by_its_place_in_the_sweep(shapes):
    run, _ = shapes
    part = folder.open_run("shapes/programs/1", run.path.parent)
    assert part.name == "shapes/programs/1"
    assert folder.open_run("shapes/programs/last", run.path.parent).path.resolve() == part.path.resolve()


def test_watching_a_sweep_follows_its_newest_program(shapes, capsys):
    run, _ = shapes
    watch.watch(str(run.path))
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"{run.path}: finished"
    assert f"{run.path / 'programs' / '1'}:" in said.out
    assert f"{run.path / 'programs' / '0'}:" not in said.out


def test_what_differs_is_shown_by_its_range(shapes, capsys):
    run, _ = shapes
    for path, expected in (
        (run.path, {"ppo.hidden": "4;8,4", "ppo.lr": "log:1e-4..1e-1"}),
        (run.programs[1].path, {"ppo.lr": "log 0.0001 … 0.1"}),
    ):
        past.show(str(path))
        lines = capsys.readouterr().out.splitlines()
        for name, values in expected.items():
            (line,) = (line for line in lines if line.startswith(f"{name} "))
            assert values in line
            assert "differs between agents" in line
    assert any(line.split() == ["ppo.hidden", "8,4", "sweep"] for line in lines)


def test_the_command_line_takes_several_sweeps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "train cartpole --agents 2 --steps 64 --devices 1 --ppo.num-envs 2 --ppo.num-steps 16"
    sweeps = ["--sweep", "ppo.lr=log:1e-4..1e-1", "--sweep=ppo.clip=0.1,0.2", "--eval-episodes", "2"]
    assert main([*words.split(), *sweeps, "--quiet", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["varied"]["ppo.clip"] == [np.float32(0.1), np.float32(0.2)]
    page = (tmp_path / "runs" / "last" / "report.html").read_text()
    assert "Score against each knob" in page
    assert main(["resume", "last", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["train", "--sweep"]) == 2
    assert "names no values" in capsys.readouterr().err
