"""N agents run in five ways: what is measured, that all agree, and what becomes of a process that dies."""

import json
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from shoal.app import modes, trial, verdict
from shoal.app.config import resolve
from shoal.app.main import main
from shoal.app.modes import Compared, Mode, Turn
from shoal.app.trial import Task, Trial
from shoal.app.worker import Worker
from shoal.errors import ShoalError

QUIET = lambda text: None
PPO = {"ppo": {"num_envs": 4, "num_steps": 16, "minibatches": 2, "epochs": 2, "hidden": (8,)}}
SMALL = {"agents": 3, "steps": 30 * 64, "eval_episodes": 2, "time_limit": 20, "devices": 2}


def settings(**flat):
    return resolve(SMALL | flat, PPO)


# --- What runs ----------------------------------------------------------------------------------


def tried(tmp_path, agents, firsts, mesh, **flat):
    """Parameters of these agents after their first updates, in this process, and the trial."""
    task = modes._task(settings(**flat), agents, firsts, mesh)._replace(params=str(tmp_path / "params.npy"))
    one = Trial(Task(**json.loads(json.dumps(task._asdict()))))
    return np.load(task.params), one


def compared(**params):
    """A comparison in which modes had these parameters after their first updates."""
    turns = {
        name: [Turn(1.0, np.ones(1), 1, 0, 0.5, 1.0, 3, x, [1.0, 2.0, 3.0])] for name, x in params.items()
    }
    made = {name: Mode(name, (), 1, 1) for name in params}
    return Compared(settings(), made, turns, {"updates": 30, "steps_per_update": 64}, [])


def test_every_mode_trains_the_same_agents_and_another_seed_does_not(tmp_path):
    alone, sequential = tried(tmp_path, 1, [0, 1, 2], "agent=1,data=1")
    third, _ = tried(tmp_path, 1, [2], "agent=1,data=1")
    fused, _ = tried(tmp_path, 3, [0], "agent=1,data=1")
    sharded, padded = tried(tmp_path, 3, [0], "agent=2,data=1")
    data, _ = tried(tmp_path, 1, [0, 1, 2], "agent=1,data=2")
    other, _ = tried(tmp_path, 3, [0], "agent=1,data=1", seed=1)
    assert len({row.tobytes() for row in alone}) == 3
    np.testing.assert_array_equal(third[0], alone[2])
    check = verdict.agreement(compared(sequential=alone, fused=fused, sharded=sharded, data=data))
    assert check["holds"]
    assert (check["updates"], check["modes"].keys()) == (20, {"sequential", "fused", "sharded", "data"})
    assert check["largest"] <= 1e-4
    check = verdict.agreement(compared(sequential=alone, fused=fused, sharded=other))
    assert not check["holds"]
    assert check["mode"] == "sharded"
    assert "sharded and sequential do not train alike" in verdict.disagreement(check)

    ran = sequential.run()
    assert len(ran["seconds"]) == 3
    assert ran["alive"] == 3
    apart, together = sequential.evaluate()["returns"], (padded.run(), padded.evaluate()["returns"])[1]
    assert len(apart) == len(together) == 3  # padding lanes are nobody
    assert all(0 < x <= 20 for x in apart)


def test_agents_that_differ_are_the_same_in_every_mode(tmp_path):
    sweep = {"sweep": ("ppo.lr=1e-2,1e-3,1e-4",)}
    alone, _ = tried(tmp_path, 1, [0, 1, 2], "agent=1,data=1", **sweep)
    fused, _ = tried(tmp_path, 3, [0], "agent=1,data=1", **sweep)
    plain, _ = tried(tmp_path, 3, [0], "agent=1,data=1")
    assert verdict.agreement(compared(sequential=alone, fused=fused))["holds"]
    assert not verdict.agreement(compared(sequential=alone, fused=plain))["holds"]


def test_replay_is_not_kept_for_every_agent_but_is_there_to_evaluate_with(tmp_path):
    sizes = {
        "dqn": {"num_envs": 2, "buffer_size": 200, "batch_size": 8, "learning_starts": 40, "hidden": (8,)}
    }
    flat = {"algo": "dqn", "agents": 2, "steps": 100, "eval_episodes": 2, "time_limit": 20, "devices": 1}
    task = modes._task(resolve(flat, sizes), 1, [0, 1])._replace(params=str(tmp_path / "params.npy"))
    one = Trial(task)
    assert one.run()["alive"] == 2
    assert all(state.learner.replay == () for state in one.trained)
    assert len(one.evaluate()["returns"]) == 2
    fresh = trial.flat(one.fresh(0).learner.params)[0]
    assert np.any(np.load(task.params)[0] != fresh)  # they are compared after learning has started


def test_peak_memory_begins_anew_and_sees_what_is_freed_again():
    trial.forget_peak()
    before = trial.peak_host_bytes()
    block = np.ones(40_000_000, np.uint8)
    del block
    assert before + 30e6 < trial.peak_host_bytes() < before + 80e6


def test_a_process_trains_what_it_is_told_and_answers(tmp_path):
    task = modes._task(settings(), 1, [2, 0])._replace(params=str(tmp_path / "params.npy"))
    with Worker("one", modes.COMMAND, os.environ) as worker:
        worker.tell(task._asdict())
        facts = worker.ready(120)
        ran = worker.ask("run", within_s=60)()
        returns = worker.ask("evaluate", within_s=60)()["returns"]
    assert (facts["kind"], facts["devices"], facts["updates"], facts["steps_per_update"]) == (
        "cpu",
        2,
        30,
        64,
    )
    assert len(ran["seconds"]) == len(returns) == 2
    assert ran["cpu_s"] > 0
    assert 1e8 < ran["host_bytes"] <= facts["start_bytes"] * 1.1


# --- Processes, by a stand-in that trains nothing -----------------------------------------------

STAND_IN = """
    import os, signal, sys, time
    import numpy as np
    from shoal.app.peers.worker import opened

    say, questions = opened()
    task = questions.get()
    train, agents = task["train"], task["train"]["agents"]
    mode = ("fused" if agents > 1 else "sequential" if len(task["firsts"]) > 1 else "concurrent")
    mode = mode if train["mesh"] == "agent=1,data=1" else "sharded" if agents > 1 else "data"
    ids = [first + i for first in task["firsts"] for i in range(agents)]
    with open({log!r}, "a") as log:
        print(mode, os.getpid(), *ids, file=log)
    np.save(task["params"], np.asarray([[i, 0.5] for i in ids], np.float32))
    facts = dict(kind="cpu", devices=2, device_limit=0, data_shards=2, updates=10, steps_per_update=64)
    facts |= dict(update_s=0.001, start_bytes=100, notes=[])
    {start}
    say(**facts)
    while True:
        if questions.get()["what"] == "evaluate":
            say(returns=[float(i) for i in ids])
            continue
        {run}
        time.sleep(0.02 * len(task["firsts"]))
        seconds = [0.02 * (2 if mode == "concurrent" else 1)] * len(task["firsts"])
        say(seconds=seconds, cpu_s=0.01, host_bytes=100, device_bytes=0, alive=len(ids))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes a stand-in the process that modes run; returns what reads [mode, pid, agents …] of each."""

    def install(start="pass", run="pass"):
        script, log = tmp_path / "stand_in.py", tmp_path / "log"
        script.write_text(textwrap.dedent(STAND_IN).format(log=str(log), start=start, run=run))
        monkeypatch.setattr(modes, "COMMAND", (sys.executable, str(script)))
        return lambda: [line.split() for line in log.read_text().splitlines()]

    return install


def alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
        return True
    except ProcessLookupError:
        return False


def test_every_mode_has_its_turn_in_every_round_and_all_processes_end(stand_in):
    started = stand_in()
    done = modes.compare(settings(), 2, QUIET)
    assert list(done.turns) == ["sequential", "concurrent", "fused", "sharded", "data"]
    assert all(len(turns) == 2 for turns in done.turns.values())
    names = [mode for mode, *_ in started()]
    assert [names.count(mode) for mode in done.turns] == [2, 2 * 3 + 1, 3, 3, 3]  # and one that compiles
    assert sorted(row[2:] for row in started() if row[0] == "concurrent")[-2:] == [["2"], ["2"]]
    assert not any(alive(pid) for _, pid, *_ in started())


def test_rows_say_what_was_measured(stand_in):
    stand_in()
    done = modes.compare(settings(), 2, QUIET)
    rows = {row["mode"]: row for row in verdict.rows(done, {})}
    steps = 3 * 10 * 64
    assert rows["sequential"]["slowdown"] == 1.0
    assert rows["concurrent"]["slowdown"] == 2.0
    assert [rows[name]["peak_bytes"] for name in rows] == [100, 300, 100, 100, 100]
    assert [rows[name]["processes"] for name in rows] == [1, 3, 1, 1, 1]
    for row in rows.values():
        assert row["env_steps_per_s"] == pytest.approx(steps / row["wall_s"], rel=0.05)
        assert row["return_mean"] == 1.0
        assert row["return_ci"][0] < 1.0 < row["return_ci"][1]
    best = max(rows[name]["env_steps_per_s"] for name in ("sequential", "fused"))
    assert rows["sharded"]["efficiency"] == pytest.approx(rows["sharded"]["env_steps_per_s"] / best / 2, 0.01)
    assert verdict.agreement(done)["largest"] == 0.0


def test_as_many_processes_run_at_a_time_as_memory_has_room_for_and_it_is_said(stand_in, monkeypatch):
    stand_in()
    monkeypatch.setattr(modes, "host_memory", lambda: 250)
    done = modes.compare(settings(), 1, QUIET)
    row = next(row for row in verdict.rows(done, {}) if row["mode"] == "concurrent")
    assert (row["processes"], row["peak_bytes"]) == (2, 200)
    assert "concurrent: 2 of 3 processes at a time, as no more fit into memory" in done.notes
    assert done.turns["concurrent"][0].params[:, 0].tolist() == [0, 1, 2]


def test_a_mode_that_does_not_fit_is_left_out_and_said_so(stand_in):
    stand_in(start='mode == "fused" and (say(refused=["too large", "fewer"]), sys.exit())')
    done = modes.compare(settings(), 1, QUIET)
    assert list(done.turns) == ["sequential", "concurrent", "sharded", "data"]
    assert done.notes == ["fused is left out: too large"]
    assert len(verdict.rows(done, {})) == 4


def test_what_refuses_one_agent_refuses_all(stand_in):
    stand_in(start='say(refused=["no such env", "shoal envs"]); sys.exit()')
    with pytest.raises(ShoalError, match="no such env"):
        modes.compare(settings(), 1, QUIET)


def test_a_killed_process_is_named_at_once_and_none_is_left(stand_in):
    killed = "ids == [1] and os.kill(os.getpid(), signal.SIGKILL); "
    started = stand_in(run=killed + 'mode == "concurrent" and time.sleep(60)')
    began = time.monotonic()
    with pytest.raises(ShoalError, match=r"concurrent, process 1 ended .* run; it was killed by SIGKILL"):
        modes.compare(settings(), 1, QUIET)
    assert time.monotonic() - began < 30
    assert sum(mode == "concurrent" for mode, *_ in started()) == 4  # and one that compiles
    assert not any(alive(pid) for _, pid, *_ in started())


def test_a_process_that_hangs_meets_its_deadline_and_none_is_left(stand_in, monkeypatch):
    started = stand_in(run='mode == "fused" and time.sleep(60)')
    monkeypatch.setattr(modes, "RUN_S", 1.0)
    with pytest.raises(ShoalError, match=r"fused has not answered 'run' within 1\.2 s"):
        modes.compare(settings(), 1, QUIET)
    assert not any(alive(pid) for _, pid, *_ in started())


def test_processes_end_with_the_one_that_started_them(stand_in, tmp_path):
    started = stand_in(run="time.sleep(60)")
    code = f"""
        from shoal.app import modes
        from shoal.app.config import resolve
        modes.COMMAND = {modes.COMMAND!r}
        modes.compare(resolve({SMALL!r}, {PPO!r}), 1, lambda text: None)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "log").exists() or len(started()) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    pid = started()[1][1]
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


# --- What is said -------------------------------------------------------------------------------


def row(mode, rate, memory, busy=0.5, **apart):
    return apart | dict(
        mode=mode,
        devices=2 if mode in ("sharded", "data") else 1,
        env_steps_per_s=rate,
        slowdown=1.0,
        peak_bytes=memory,
        utilisation=busy,
        cpu_s=200 / rate,
    )


def test_the_recommendation_gives_the_numbers_by_which_it_wins():
    rows = [row("sequential", 100, 100), row("fused", 200, 300), row("sharded", 400, 300, 0.98)]
    said = verdict.recommendation(rows, 8)
    assert said.startswith("Run 8 agents in one program over 2 devices: 400 env steps/s, 2.00 times fused")
    assert "4.00 times sequential" in said
    assert "98% busy and takes 0.5 s of CPU time; fused 50% busy and takes 1.0 s" in said
    assert "if that is too much, sequential takes 100 B" in said


def test_of_modes_as_fast_as_each_other_the_one_in_less_memory_is_recommended():
    rows = [row("concurrent", 400, 900), row("sharded", 395, 300)]
    said = verdict.recommendation(rows, 8)
    assert "in one program over 2 devices" in said
    assert "as fast as concurrent but for noise, in less memory" in said
    assert "processes of their own" in verdict.recommendation([row("concurrent", 450, 900), rows[1]], 8)


def test_crossed_settings_are_read_and_shown():
    made = list(modes.variants(settings(), ["ppo.num_envs=4,8", "microbatch=0,16"]))
    assert [point for point, _ in made][1] == {"ppo.num_envs": "4", "microbatch": "16"}
    assert [(s.algo["num_envs"], s.train.microbatch) for _, s in made] == [(4, 0), (4, 16), (8, 0), (8, 16)]
    assert all(s.train.agents == 3 and s.algo["hidden"] == (8,) for _, s in made)
    rows = [row("fused", 100, 1, precision="f32"), row("fused", 150, 1, precision="bf16")]
    assert "(precision=bf16)" in verdict.recommendation(rows, 8)
    with pytest.raises(ShoalError, match="changes nothing"):
        list(modes.variants(settings(), ["microbatch=1"]))
    with pytest.raises(ShoalError, match="no setting presicion"):
        list(modes.variants(settings(), ["presicion=f32,bf16"]))


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        ({"pbt": True}, "--pbt"),
        ({"stop_at": 1.0}, "--stop-at"),
        ({"mesh": "agent=2"}, "--mesh"),
        ({"agents": 1}, "--agents 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(flat, said):
    with pytest.raises(ShoalError, match=said):
        modes.compare(settings(**flat), 1, QUIET)


def test_the_verb_ends_stdout_with_rows_and_draws_a_picture(stand_in, tmp_path, capsys):
    stand_in()
    words = ["modes", "cartpole", "--agents", "3", "--devices", "2", "--out", str(tmp_path / "pictures")]
    assert main([*words, "--json", "--cross", "ppo.num_envs=4,8"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    names = ["sequential", "concurrent", "fused", "sharded", "data"]
    assert [row["mode"] for row in told["rows"]] == 2 * names
    assert [row["ppo.num_envs"] for row in told["rows"]] == 5 * ["4"] + 5 * ["8"]
    assert told["recommendation"].startswith("Run 3 agents ")
    picture = (tmp_path / "pictures" / "modes-cartpole.svg").read_text()
    assert picture.startswith("<svg")
    assert "var(" not in picture
    assert all(name in picture for name in names)


def test_the_verb_fails_loudly_where_modes_do_not_agree(stand_in, tmp_path, capsys):
    stand_in(start='mode == "data" and np.save(task["params"], np.asarray([[i, 0.6] for i in ids]))')
    assert main(["modes", "--agents", "3", "--devices", "2", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "Run 3 agents" in out
    assert "error: data and sequential do not train alike: after 10 updates agent 0" in err
