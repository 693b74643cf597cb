import json

import numpy as np
import pytest

from shoal.app.main import main
from shoal.app.run import Run
from shoal.app.watch import replay
from shoal.runs import folder
from shoal.runs.manifest import read_json, write_json, write_toml
from shoal.runs.metrics import RowWriter
from shoal.training import events


def make_run(root, name, returns, env="cartpole", finished=True, updates=(4, 8)):
    """A run as training leaves it, without training."""
    run = folder.create(root, env, "ppo", root / name)
    agents = len(returns)
    facts = dict(
        **dict(started="2026-01-02T03:04:05+00:00", env=env, algo="ppo", agents=agents, lanes=agents),
        **dict(
            devices=1,
            device="cpu",
            steps=800,
            steps_asked=800,
            updates=8,
            notes=["a note"],
            finished=finished,
        ),
    )
    if finished:
        facts["result"] = dict(
            **dict(path=str(run.path), agents=agents, alive=agents, env_steps=800 * agents, wall_s=2.0),
            **dict(total_s=3.0, diverged=[], env=env, algo="ppo"),
            **dict(compile_s=1.0, env_steps_per_s=800.0, return_ci=None, return_greedy=1.0),
            **dict(return_mean=float(np.mean(returns)), return_iqm=1.0, returns=list(returns)),
        )
    write_json(run.manifest, facts)
    settings = {"train": {"env": env, "agents": agents}, "ppo": {"lr": 0.001, "hidden": [64, 64]}}
    write_toml(run.config, settings, {"train.env": "command line", "ppo.lr": "preset"})
    with RowWriter(run.metrics) as rows:
        for done in updates:
            rows.write(
                dict(
                    **dict(env_steps=np.full(agents, done * 100), updates=done, wall_s=done / 4),
                    **dict(agent=np.arange(agents), return_mean=np.array(returns, float) * done / 8),
                    **dict(env_steps_per_s=1000.0, alive=np.full(agents, True)),
                )
            )
    return run


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "good", np.linspace(400, 500, 8))
    make_run(tmp_path / "runs", "bad", np.linspace(100, 200, 8))
    make_run(tmp_path / "runs", "single", [300.0])
    make_run(tmp_path / "runs", "swing", [-200.0, -100.0], env="pendulum", finished=False, updates=(4,))
    return tmp_path / "runs"


def names(capsys, *words):
    assert main(["runs", "--json", *words]) == 0
    return {row["name"] for row in json.loads(capsys.readouterr().out)}


def test_runs_are_listed_with_what_they_reached(root, capsys):
    assert main(["runs", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["good"]["return"], rows["good"]["status"], rows["good"]["steps"]) == (450.0, "finished", 800)
    assert (rows["swing"]["return"], rows["swing"]["status"], rows["swing"]["steps"]) == (
        -75.0,
        "stopped",
        400,
    )
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:4] == ["name", "env", "algo", "agents"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("return>250 and algo=ppo", {"good", "single"}),
        ("return <= -75", {"swing"}),
        ("env!=cartpole", {"swing"}),
        ("status = finished and agents >= 8", {"good", "bad"}),
        ("agents>100", set()),
    ],
)
def test_a_filter_takes_any_column(root, capsys, where, expected):
    assert names(capsys, "--where", where) == expected


@pytest.mark.parametrize("where", ["retrun>3", "return", "agents>many"])
def test_a_filter_that_means_nothing_is_refused(root, where):
    assert main(["runs", "--where", where]) == 2


def test_removing_asks_and_counts_bytes(root, capsys):
    assert main(["runs", "rm", "good"]) == 2  # no terminal to ask on
    assert "--yes" in capsys.readouterr().err
    assert main(["runs", "rm", "--where", "return<250", "--yes"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("removed 2 run(s), ")
    assert "bad" in err
    assert names(capsys) == {"good", "single"}


def test_a_live_run_is_not_removed(root, capsys):
    with folder.lock(folder.open_run("good", root)):
        assert main(["runs", "rm", "good", "--yes"]) == 2
    assert "good" in names(capsys)


def test_show_gives_each_setting_with_its_origin(root, capsys):
    assert main(["show", "good"]) == 0
    out = capsys.readouterr().out
    assert ["ppo.lr", "0.001", "preset"] in [line.split() for line in out.splitlines()]
    assert "return 450.0" in out
    assert main(["show", "good", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["ppo.hidden"] == [64, 64]
    assert shown["origins"] == {"env": "command line", "ppo.lr": "preset"}


def test_compare_says_how_sure_it_is(root, capsys):
    assert main(["compare", "good", "bad", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["probability_of_improvement"] == 1.0
    low, high = row["runs"][0]["interval"]
    assert low < row["runs"][0]["iqm"] < high
    assert main(["compare", "good", "bad"]) == 0
    assert "with probability 1.00" in capsys.readouterr().out


def test_one_agent_gives_no_interval(root, capsys):
    assert main(["compare", "good", "single", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["runs"][1]["interval"] is None
    assert row["probability_of_improvement"] is None


@pytest.mark.parametrize(("other", "said"), [("swing", "pendulum"), ("nothing", "nothing")])
def test_what_cannot_be_compared_is_refused(root, capsys, other, said):
    assert main(["compare", "good", other]) == 2
    assert said in capsys.readouterr().err


def edit(run, **result):
    facts = read_json(run.manifest)
    write_json(run.manifest, facts | {"result": facts["result"] | result})


def test_agents_without_a_return_give_no_interval(root, capsys):
    edit(folder.open_run("good", root), returns=[None, *range(7)], return_mean=None, return_iqm=None)
    assert main(["compare", "good", "bad", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["runs"][0]["interval"] is row["runs"][0]["mean"] is row["probability_of_improvement"] is None
    assert main(["compare", "good", "bad"]) == 0
    out = capsys.readouterr().out
    assert "no interval and no probability: 1 of 8 agents of good have no return" in out
    assert "nan" not in out
    assert main(["show", "good"]) == 0
    assert "return –" in capsys.readouterr().out
    assert repr(Run("good", root)) == f"Run({root / 'good'}, return – over 8 agents)"
    assert "good" in names(capsys)


def test_a_run_without_an_agent_left_is_diverged(root, capsys):
    edit(folder.open_run("bad", root), alive=0, diverged=list(range(8)))
    assert names(capsys, "--where", "status=diverged") == {"bad"}


DAMAGE = {
    "a garbage row": ("metrics.jsonl", b"garbage\n"),
    "a row that is no row": ("metrics.jsonl", b"5\n"),
    "a row without columns": ("metrics.jsonl", b"{}\n"),
    "a manifest that is a list": ("manifest.json", b"[]"),
    "a manifest without keys": ("manifest.json", b"{}"),
    "a manifest cut short": ("manifest.json", b'{"env": '),
    "no settings": ("config.toml", None),
    "settings cut short": ("config.toml", b"[train"),
}


def damage(run, name, data):
    path = run.path / name
    if data is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() * (name == "metrics.jsonl") + data)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_run_is_listed_as_such_and_hides_no_other(root, capsys, kind):
    damage(folder.open_run("good", root), *DAMAGE[kind])
    assert main(["runs", "--json"]) == 0
    status = {row["name"]: row["status"] for row in json.loads(capsys.readouterr().out)}
    assert status == {"good": "damaged", "bad": "finished", "single": "finished", "swing": "stopped"}
    assert main(["runs"]) == 0
    assert main(["runs", "rm", "good", "--yes"]) == 0


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("verb", ["show", "watch", "report"])
def test_what_is_damaged_is_said_with_its_place(root, capsys, kind, verb):
    name, data = DAMAGE[kind]
    damage(folder.open_run("good", root), name, data)
    code, err = main([verb, "good"]), capsys.readouterr().err
    if code == 0:  # what a verb does not need may be damaged
        assert (verb, name) in {
            ("show", "metrics.jsonl"),
            ("show", "manifest.json"),
            ("report", "config.toml"),
            ("report", "manifest.json"),
            ("report", "metrics.jsonl"),
            ("watch", "metrics.jsonl"),
        }
    else:
        assert code == 2
        assert name in err


def test_a_run_is_watched_from_its_files(root):
    seen = list(replay(folder.open_run("good", root)))
    plan, first, last = seen
    assert isinstance(plan, events.Planned)
    assert (plan.agents, plan.updates, plan.notes) == (8, 8, ("a note",))
    assert (first.updates, first.total_updates, first.eta_s) == (4, 8, 1.0)
    assert (last.updates, last.eta_s) == (8, 0.0)
    np.testing.assert_allclose(last.returns, np.linspace(400, 500, 8))


def test_watching_goes_on_while_the_run_is_live(root):
    run = folder.open_run("swing", root)
    with folder.lock(run):
        seen = replay(run)
        assert isinstance(next(seen), events.Planned)
        assert next(seen).updates == 4
        with RowWriter(run.metrics) as rows:
            shared = dict(
                env_steps=800, updates=8, wall_s=2.0, return_mean=1.0, env_steps_per_s=1.0, alive=True
            )
            rows.write(dict(agent=np.arange(2), **shared))
        assert next(seen).updates == 8
    assert list(seen) == []
