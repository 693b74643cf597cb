"""The comparison with others: turns, rates, and what becomes of a contestant that hangs or dies."""

import json
import sys
import textwrap

import pytest

from shoal.app import contest
from shoal.app.contest import Contestant, Workload, compare, contestants, markdown
from shoal.app.main import main
from shoal.errors import ShoalError

TINY = Workload(agents=4, envs=2, steps=8, minibatches=2)
QUIET = lambda text: None


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes a contestant whose process runs the code given instead of a training."""

    def make(name, code, **given):
        folder = tmp_path / "peers"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
        return Contestant(name, name, sys.executable, **given)

    worker = tmp_path / "peers" / "worker.py"
    worker.parent.mkdir(exist_ok=True)
    worker.write_text(contest.WORKER.read_text())
    monkeypatch.setattr(contest, "WORKER", worker)
    return make


STEADY = """
    import time

    PACKAGES, NOTE = ("pytest",), "a stand-in"

    def start(task):
        def stretch():
            time.sleep({seconds})
            return task["stretch"] * task["agents"]
        return stretch, lambda: [float(task["first"] + i) for i in range(task["agents"])], 1.5
"""


def test_each_row_has_a_rate_and_its_ratio_to_the_textbook(fake):
    slow, quick = (fake(name, STEADY.format(seconds=s)) for name, s in (("textbook", 0.2), ("quick", 0.05)))
    rows = compare([slow, quick], TINY, 3, True, QUIET)
    assert [row["name"] for row in rows] == ["textbook", "quick"]
    assert rows[0]["ratio_to_textbook"] == 1.0
    assert 2.0 < rows[1]["ratio_to_textbook"] < 8.0
    assert rows[1]["low"] <= rows[1]["env_steps_per_s"] <= rows[1]["high"]
    assert rows[0]["return_mean"] == 1.5  # of agents 0 … 3
    assert rows[0]["versions"].keys() == {"pytest"}
    table = markdown(rows)
    assert "4 × 2 envs" in table
    assert table.count("\n| ") == 3


def test_several_processes_share_the_agents_and_their_rates_add_up(fake):
    alone = fake("textbook", STEADY.format(seconds=0.2))
    shared = fake("shared", STEADY.format(seconds=0.2).replace('task["stretch"]', "100"), processes=2)
    rows = compare([alone, shared], TINY, 1, True, QUIET)
    assert rows[1]["return_mean"] == 1.5
    assert rows[1]["trained"] == 4


def test_one_agent_at_a_time_is_extrapolated_and_says_so(fake):
    rows = compare([fake("single", STEADY.format(seconds=0.01), one_agent=True)], TINY, 1, True, QUIET)
    assert rows[0]["note"].startswith("extrapolated")
    assert rows[0]["ratio_to_textbook"] is None
    assert rows[0]["trained"] == 1


def test_a_contestant_that_dies_is_named_with_what_it_said(fake):
    ill = fake("ill", "raise RuntimeError('no such device')")
    with pytest.raises(ShoalError, match=r"ill ended while asked to start; it said: .*no such device"):
        compare([ill], TINY, 1, False, QUIET)


def test_a_contestant_that_hangs_is_named_and_no_process_is_left(fake, monkeypatch):
    monkeypatch.setattr(contest, "DEADLINES_S", {"start": 20, "stretch": 0.5, "learn": 1})
    started = []
    begin = contest.Worker.__enter__

    def seen(self):
        started.append(self)
        return begin(self)

    monkeypatch.setattr(contest.Worker, "__enter__", seen)
    stuck = fake("stuck", STEADY.format(seconds=60))
    with pytest.raises(ShoalError, match=r"stuck has not answered .stretch. within 0\.5 s"):
        compare([fake("textbook", STEADY.format(seconds=0.01)), stuck], TINY, 1, False, QUIET)
    assert len(started) == 2
    assert all(worker.process.poll() is not None for worker in started)


def test_peers_that_are_not_installed_are_left_out_and_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found, missing = contestants()
    assert {one.name for one in found} <= {"shoal", "textbook", "textbook-per-core"}
    assert len(missing) == 2
    assert all("shoal bench peers" in line for line in missing)


def test_shoal_and_the_textbook_train_for_real(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (("STRETCH_STEPS", 200), ("LEARN_STEPS", 4000), ("LEARN_UPDATES", 1)):
        monkeypatch.setattr(contest, name, value)
    words = "bench ppo-cartpole --agents 2 --envs 2 --steps-per-env 16 --minibatches 2 --rounds 1 --json"
    assert main(words.split()) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {"shoal", "textbook"} <= {row["name"] for row in rows}
    for row in rows:
        assert row["env_steps_per_s"] > 0
        assert row["return_mean"] > 15  # a random policy reaches about 22
        assert (row["agents"], row["envs"], row["trained"]) == (2, 2, 2)
