import io

import numpy as np
import pytest

from shoal.app import board as module
from shoal.app.board import Board, board
from shoal.training import events

PLAN = events.Planned("cartpole", "ppo", 3, 4, 8, 2, "cpu", 1000, 1024, 8, 5_000_000, ("TF32 is off",))


def progress(updates, returns=(1.0, 2.0, 9.0)):
    returns = np.array(returns)
    return events.Progress(
        updates, 8, updates * 128, 1.5e5, 2.0, 61.0, returns, np.array([True, True, False])
    )


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_the_board_shows_plan_compile_and_progress(clock):
    shown = Board()
    for event in (PLAN, events.Compiled("training", 5.25), progress(2), events.Compiling("evaluation")):
        shown(event)
    clock[0] = 3.0
    text = "\n".join(shown.lines())
    for part in (
        "cartpole ppo: 3 agents × 8 envs on 2 cpu devices; 1,024 steps each (asked: 1,000) in 8 updates",
        *("about 5 MB", "note: TF32 is off", "training 5.2 s   evaluation 3.0 s …"),
        *("25%", "150k steps/s", "1 min 01 s left", "min 1.0  median 2.0  max 9.0", "alive 2/3"),
    ):
        assert part in text


def test_lines_come_every_few_seconds_and_at_changes_of_phase(clock, capsys):
    shown = Board(lines=True)
    for updates in (1, 2, 3, 4, 5, 6):
        shown(progress(updates))
        clock[0] += 2.0
    shown(events.Stopping("Ctrl-C"))
    shown(progress(8))
    shown(events.Saved(8))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["12%", "50%", "stopping:", "100%"]


def test_quiet_says_nothing(capsys):
    with board(quiet=True) as listen:
        for event in (PLAN, progress(1), events.Diverged(2, 5)):
            listen(event)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_live_board(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(module.sys, "stderr", terminal)
    with board() as listen:
        listen(PLAN)
        listen(progress(8))
        listen(events.Diverged(2, 5))
    drawn = terminal.getvalue()
    assert "agent 2 diverged in update 5" in drawn
    assert "100%" in drawn


def test_no_finished_episode_is_a_dash():
    shown = Board()
    shown(progress(1, (np.nan, np.nan, np.nan)))
    assert "min –  median –  max –" in "\n".join(shown.lines())


def test_events_cost_microseconds():
    import timeit

    shown, event = Board(), progress(3, np.arange(3.0))
    assert min(timeit.repeat(lambda: shown(event), number=100, repeat=3)) / 100 < 500e-6
