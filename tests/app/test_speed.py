"""Rows of the speed benchmarks: of stand-ins with known rates, and of real trainings at the smallest size."""

import json

import numpy as np
import pytest

from shoal.app import contest, speed
from shoal.app.contest import Contestant, Entry, Measured, Workload
from shoal.app.main import main

FACTS = dict(compile_s=1.0, note="a stand-in", versions={}, bytes=8_000_000)
QUIET = lambda text: None


@pytest.fixture
def rated(monkeypatch):
    """Instead of training, measures rates that depend on the entry."""

    def use(rates):
        def compare(entries, rounds, learn, say):
            return [Measured(e, np.asarray(rates(e), float), [1.0, 3.0] * learn, FACTS) for e in entries]

        monkeypatch.setattr(speed, "compare", compare)

    return use


def test_ratios_are_medians_of_each_rounds_ratio(rated):
    rated(lambda e: [3, 40, 3] if e.contestant.name == "shoal" else [1, 10, 2])
    rows = speed.ppo_cartpole([Workload()], 3, True, QUIET)
    assert [row["name"] for row in rows][:2] == ["shoal", "textbook"]
    assert rows[0]["ratio_to_textbook"] == 3.0  # of 3, 4 and 1.5
    assert rows[1]["ratio_to_textbook"] == 1.0
    assert (rows[0]["env_steps_per_s"], rows[0]["low"], rows[0]["high"]) == (3, 3, 40)
    assert (rows[0]["return_mean"], rows[0]["return_sd"], rows[0]["trained"]) == (2.0, 1.4, 2)


def test_a_lone_agent_is_not_split_over_processes(rated):
    rated(lambda e: [1.0])
    assert "textbook-per-core" not in {r["name"] for r in speed.ppo_cartpole([Workload(1)], 1, False, QUIET)}


def test_what_was_extrapolated_says_so():
    one = Contestant("alone", "alone", "python", one_agent=True)
    made = lambda agents: speed.row(Measured(Entry(one, Workload(agents)), np.ones(3), [], FACTS))
    assert made(16)["note"] == "extrapolated from one agent; a stand-in"
    assert made(1)["note"] == "a stand-in"
    assert made(1)["return_mean"] is None


def test_dqn_is_compared_with_one_agent_per_core_and_with_rejax(rated, monkeypatch):
    monkeypatch.setattr(speed, "installed", lambda peers, say: list(peers))
    rated(lambda e: [2.0 if e.contestant.name == "rejax" else 8.0 if e.workload.agents == 16 else 10.0])
    many, few, rejax = speed.dqn_cartpole(1, False, QUIET)
    assert many["ratio_to_rejax"] == 4.0
    assert many["wall_per_agent_to_one_per_core"] == 1.25
    assert few["wall_per_agent_to_one_per_core"] == 1.0
    assert rejax["ratio_to_rejax"] == 1.0


def test_dqn_without_rejax_has_no_ratio_to_it(rated, monkeypatch):
    monkeypatch.setattr(speed, "installed", lambda peers, say: [])
    rated(lambda e: [1.0])
    assert [row["ratio_to_rejax"] for row in speed.dqn_cartpole(1, False, QUIET)] == [None, None]


def test_scaling_compares_with_the_least_wall_time_of_its_kind(rated):
    rated(lambda e: [100.0 + e.workload.agents])
    rows = speed.scaling(1, QUIET)
    agents = [row for row in rows if row["grows"] == "agents"]
    assert [row["agents"] for row in agents] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert agents[-1]["wall_to_least"] == 1.0
    assert agents[0]["wall_to_least"] == round(356 / 101, 3)
    assert agents[1]["mb_per_agent"] == 4.0
    assert {row["net"] for row in rows if row["grows"] == "cnn"} == {"cnn"}


def test_shoal_and_the_textbook_train_for_real(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no peers are installed
    small = (("TURN_S", 0.1), ("TIMED_STEPS", 1), ("LEARN_STEPS", 4000), ("LEARN_UPDATES", 1))
    for name, value in small:
        monkeypatch.setattr(contest, name, value)
    words = "bench ppo-cartpole --agents 2 --envs 2 --steps-per-env 16 --minibatches 2 --rounds 1 --json"
    assert main(words.split()) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {"shoal", "textbook"} <= {row["name"] for row in rows}
    for row in rows:
        assert row["env_steps_per_s"] > 0
        assert row["return_mean"] > 15  # a random policy reaches about 22
        assert (row["agents"], row["envs"], row["trained"]) == (2, 2, 2)


def test_a_profile_of_an_accelerator_runs_small_on_the_cpu(monkeypatch, capsys):
    tiny = [work._replace(agents=2, envs=2, device="cpu") for work in speed.PROFILES["gpu"]]
    tiny = [work._replace(steps=min(work.steps, 8), minibatches=1) for work in tiny]
    monkeypatch.setitem(speed.PROFILES, "gpu", tiny)
    for name, value in (("TURN_S", 0.05), ("TIMED_STEPS", 1), ("DQN_STARTS", 10)):
        monkeypatch.setattr(contest, name, value)
    assert main(["bench", "--device", "gpu", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["algo"], row["env"], row["net"]) for row in rows] == [
        ("ppo", "cartpole", "mlp"),
        ("ppo", "breakout", "mlp"),
        ("ppo", "breakout", "cnn"),
        ("dqn", "cartpole", "mlp"),
    ]
    assert all(row["env_steps_per_s"] > 0 and row["mb_per_agent"] > 0 for row in rows)


def test_a_profile_of_a_device_that_is_not_there_says_so(monkeypatch, capsys):
    monkeypatch.setitem(speed.PROFILES, "gpu", speed.PROFILES["gpu"][:1])
    assert main(["bench", "--device", "gpu"]) == 2
    assert "JAX sees no such device" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["bench --device toaster", "bench scaling --rounds 0"])
def test_what_cannot_be_measured_is_an_error(words, capsys):
    assert main(words.split()) == 2
    assert "hint:" in capsys.readouterr().err
