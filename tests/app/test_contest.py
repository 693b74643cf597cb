"""Contestants in turns: rates, trainings, and what becomes of one that hangs or dies."""

import sys
import textwrap

import numpy as np
import pytest

from shoal.app import contest
from shoal.app.contest import Contestant, Entry, Workload, compare, installed, peer
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
    monkeypatch.setattr(contest, "TURN_S", 0.2)
    monkeypatch.setattr(contest, "TIMED_STEPS", 1)
    return make


STEADY = """
    import time

    PACKAGES = ("pytest",)

    def start(task):
        def stretch(updates):
            time.sleep(updates * {seconds})
            return updates * task["agents"]
        returns = lambda: [float(task["first"] + i) for i in range(task["agents"])]
        return stretch, returns, dict(compile_s=1.5, note="a stand-in")
"""


def test_each_trains_for_about_the_same_time_in_every_round(fake):
    slow, quick = (fake(name, STEADY.format(seconds=s)) for name, s in (("slow", 0.02), ("quick", 0.005)))
    measured = compare([Entry(slow, TINY), Entry(quick, TINY)], 3, True, QUIET)
    assert [m.entry.contestant.name for m in measured] == ["slow", "quick"]
    assert all(m.rates.shape == (3,) for m in measured)
    assert 2.0 < np.median(measured[1].rates) / np.median(measured[0].rates) < 8.0
    assert measured[0].returns == [0.0, 1.0, 2.0, 3.0]
    assert measured[0].facts["versions"].keys() == {"pytest"}
    assert measured[0].facts["compile_s"] == 1.5


def test_one_contestant_may_enter_with_several_workloads(fake):
    one, said = fake("one", STEADY.format(seconds=0.01)), []
    measured = compare([Entry(one, TINY), Entry(one, TINY._replace(agents=8))], 1, False, said.append)
    assert measured[1].rates[0] > 1.5 * measured[0].rates[0]
    assert measured[0].returns == []
    assert "4 × 2 envs" in said[-1]
    assert "8 × 2 envs" in said[-1]


def test_several_processes_share_the_agents_and_their_rates_add_up(fake):
    one = fake("one", STEADY.format(seconds=0.01))
    shared = one._replace(processes=2)
    alone, both = compare([Entry(one, TINY), Entry(shared, TINY)], 3, True, QUIET)
    assert both.returns == alone.returns == [0.0, 1.0, 2.0, 3.0]
    assert 0.7 < np.median(both.rates) / np.median(alone.rates) < 1.3  # half the agents each, both at once


def test_a_slow_contestant_is_timed_for_long_enough(fake, monkeypatch):
    monkeypatch.setattr(contest, "TURN_S", 0.01)
    monkeypatch.setattr(contest, "TIMED_STEPS", 5 * TINY.per_update * 4)  # five updates of its agents
    asked = []
    ask = contest.Worker.ask

    def seen(self, what, **given):
        asked.append(given)
        return ask(self, what, **given)

    monkeypatch.setattr(contest.Worker, "ask", seen)
    compare([Entry(fake("one", STEADY.format(seconds=0.02)), TINY)], 2, False, QUIET)
    assert [given["updates"] for given in asked[-2:]] == [3, 3]


def test_one_agent_at_a_time_trains_one(fake):
    one = fake("single", STEADY.format(seconds=0.01), one_agent=True)
    assert compare([Entry(one, TINY)], 1, True, QUIET)[0].returns == [0.0]


def test_a_contestant_that_dies_is_named_with_what_it_said(fake):
    ill = fake("ill", "raise RuntimeError('no such device')")
    with pytest.raises(ShoalError, match=r"ill ended while asked to start; it said: .*no such device"):
        compare([Entry(ill, TINY)], 1, False, QUIET)


def test_a_contestant_that_hangs_is_named_and_no_process_is_left(fake, monkeypatch):
    monkeypatch.setattr(contest, "DEADLINES_S", {"start": 20, "stretch": 0.5, "learn": 1})
    started = []
    begin = contest.Worker.__enter__

    def seen(self):
        started.append(self)
        return begin(self)

    monkeypatch.setattr(contest.Worker, "__enter__", seen)
    entries = [
        Entry(fake(name, STEADY.format(seconds=s)), TINY) for name, s in (("one", 0.05), ("stuck", 60))
    ]
    with pytest.raises(ShoalError, match=r"stuck has not answered .stretch. within 0\.5 s"):
        compare(entries, 1, False, QUIET)
    assert len(started) == 2
    assert all(worker.process.poll() is not None for worker in started)


def test_peers_that_are_not_installed_are_left_out_and_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = []
    assert installed([peer("rejax", "rejax_algos")], said.append) == []
    assert "rejax is not installed and left out: shoal bench peers installs it" in said
