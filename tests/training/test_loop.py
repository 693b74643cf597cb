"""The host loop on a stand-in for the compiled programs: pace, rows, evaluations, stops."""

import os
import signal
from typing import NamedTuple

import numpy as np
import pytest

from shoal.rollout.device import Scores
from shoal.training import events, loop
from shoal.training.loop import Plan, Tally
from shoal.training.signals import Stop, stopping


class Who(NamedTuple):
    agent: np.ndarray
    active: np.ndarray
    updates: np.ndarray


class State(NamedTuple):
    identity: Who


class Recorder:
    """A store and a listener that remember."""

    def __init__(self):
        self.written, self.evaluated, self.saved, self.events, self.replaced = [], [], [], [], []

    def rows(self, columns):
        self.written.append(columns)

    def evaluation(self, columns):
        self.evaluated.append(columns)

    def lineage(self, columns):
        self.replaced.append(columns)

    def save(self, state, tally):
        self.saved.append(tally)

    def listen(self, event):
        self.events.append(event)


def fake_chunk(state, number):
    """Two agents that each finish one episode of return 10 and length 5 per update."""
    done = np.full(2, float(number))
    metrics = dict(
        updates=done, episodes=done, return_sum=10 * done, length_sum=5 * done, policy_loss=3 * done
    )
    return State(state.identity._replace(updates=state.identity.updates + number)), metrics


def fake_evaluate(state):
    returns = np.tile(state.identity.updates[:, None].astype(float), 4)
    scores = Scores(returns, np.ones((2, 4), int), np.ones((2, 4), bool))
    return scores, scores


def run(plan, chunk=fake_chunk, tally=None, hook=None, select=None):
    store = Recorder()
    state = State(Who(np.arange(2), np.ones(2, bool), np.zeros(2, int)))
    with stopping() as stop:
        state, tally = loop.train(
            plan, chunk, fake_evaluate, state, tally or Tally(), store, stop, store.listen, hook, select
        )
    return store, state, tally, stop


def test_the_budget_is_exact_and_every_update_is_in_one_row():
    store, state, tally, stop = run(Plan(agents=2, updates=1003, steps_per_update=7, chunk=10))
    assert tally.updates == 1003
    assert (state.identity.updates == 1003).all()
    assert not stop
    ends = [int(row["updates"][0]) for row in store.written]
    assert ends == [*range(10, 1001, 10), 1003]
    assert all((row["env_steps"] == row["updates"] * 7).all() for row in store.written)


def test_rows_hold_means_over_the_chunk():
    store, *_ = run(Plan(agents=2, updates=20, steps_per_update=1, chunk=10))
    row = store.written[0]
    assert row["return_mean"].tolist() == [10.0, 10.0]
    assert row["length_mean"].tolist() == [5.0, 5.0]
    assert row["policy_loss"].tolist() == [3.0, 3.0]
    assert row["episodes"].tolist() == [10, 10]


def test_no_finished_episode_gives_no_return():
    def without(state, number):
        state, metrics = fake_chunk(state, number)
        return state, metrics | {name: 0 * metrics[name] for name in ("episodes", "return_sum", "length_sum")}

    store, *_ = run(Plan(agents=2, updates=2, steps_per_update=1), without)
    assert np.isnan(store.written[0]["return_mean"]).all()


def test_evaluations_come_at_their_updates_and_the_best_one_is_saved():
    store, _, tally, _ = run(Plan(agents=2, updates=25, steps_per_update=1, chunk=7, eval_every=10))
    assert [int(row["updates"][0]) for row in store.evaluated] == [10, 20]
    assert tally.best_updates == 20
    assert {10, 20, 25} <= {saved.updates for saved in store.saved}


def test_selections_come_at_their_updates_before_what_is_saved_there_and_not_at_the_end():
    def select(state, tally):
        newcomer = state.identity._replace(agent=state.identity.agent + np.asarray([0, 5]))
        event = events.Selected(tally.updates, 1, 2, "new samples")
        return State(newcomer), tally._replace(judged=(*tally.judged, tally.updates)), {"agent": [5]}, event

    plan = Plan(agents=2, updates=30, steps_per_update=1, chunk=7, select_every=10, checkpoint_every=0)
    store, _, tally, _ = run(plan, select=select)
    assert tally.judged == (10, 20)
    assert len(store.replaced) == 2
    saved = {at.updates: at.judged for at in store.saved}
    assert saved[10] == (10,)
    assert {int(row["updates"][0]): row["agent"][1] for row in store.written} == {
        7: 1,
        10: 1,
        14: 6,
        20: 6,
        21: 11,
        28: 11,
        30: 11,
    }
    assert sum(isinstance(event, events.Selected) for event in store.events) == 2


def test_stop_at_ends_the_run_as_complete():
    store, _, tally, stop = run(Plan(agents=2, updates=100, steps_per_update=1, chunk=5, stop_at=10.0))
    assert tally.updates == 5
    assert stop.complete
    assert "reached 10" in stop.reason
    assert any(isinstance(event, events.Stopping) for event in store.events)


def test_a_time_budget_ends_the_run_as_complete():
    _, _, tally, stop = run(Plan(agents=2, updates=10**9, steps_per_update=1, chunk=1, seconds=0.05))
    assert stop.complete
    assert 0 < tally.updates < 10**9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_after_the_chunk(number):
    def hook(progress, state):
        if progress.updates == 10:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    store, _, tally, stop = run(Plan(agents=2, updates=100, steps_per_update=1, chunk=5), hook=hook)
    assert tally.updates == 10
    assert store.saved[-1].updates == 10
    assert not stop.complete
    assert signal.getsignal(number) is before


def test_a_second_interrupt_stops_at_once():
    def hook(progress, state):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(Plan(agents=2, updates=100, steps_per_update=1, chunk=5), hook=hook)


def test_rows_are_on_disk_before_the_checkpoint_that_follows_them():
    order = []

    class Ordered(Recorder):
        def rows(self, columns):
            order.append(("rows", int(columns["updates"][0])))

        def save(self, state, tally):
            order.append(("save", tally.updates))

    store = Ordered()
    state = State(Who(np.arange(2), np.ones(2, bool), np.zeros(2, int)))
    plan = Plan(agents=2, updates=12, steps_per_update=1, chunk=3, checkpoint_every=0.0)
    loop.train(plan, fake_chunk, fake_evaluate, state, Tally(), store, Stop())
    assert order == [(kind, n) for n in (3, 6, 9, 12) for kind in ("rows", "save")]


def test_a_hook_may_replace_the_state():
    def hook(progress, state):
        return State(state.identity._replace(updates=state.identity.updates + 1000))

    _, state, _, _ = run(Plan(agents=2, updates=10, steps_per_update=1, chunk=5), hook=hook)
    assert (state.identity.updates == 2010).all()


def test_a_diverged_agent_is_named():
    def chunk(state, number):
        state, metrics = fake_chunk(state, number)
        return State(state.identity._replace(active=np.array([True, False]))), metrics

    store, *_ = run(Plan(agents=2, updates=10, steps_per_update=1, chunk=5), chunk)
    assert [e.agent for e in store.events if isinstance(e, events.Diverged)] == [1]


def test_padding_lanes_are_in_no_row():
    def chunk(state, number):
        state, metrics = fake_chunk(state, number)
        return state, {name: np.append(x, 99.0) for name, x in metrics.items()}

    store, *_ = run(Plan(agents=2, updates=4, steps_per_update=1), chunk)
    assert all(len(column) == 2 for row in store.written for column in row.values())


def test_chunks_shrink_where_updates_are_slow():
    pace = loop._Pace(Plan(agents=1, updates=10_000, steps_per_update=1))
    assert pace.next(0) == 1
    pace.took(1, 0.5)
    assert pace.next(1) == 3  # to the next multiple of four, and four take two seconds
    assert pace.next(4) == 4
