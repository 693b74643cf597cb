"""The host's side of training: run chunks, and write the previous one's rows while the next one runs.

The device is never waited for twice: a chunk is dispatched, the rows of the one before are written, and
only then are this chunk's metrics read. So at most one program is in flight, which XLA's CPU backend needs
where a program holds collectives.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from shoal.algos.update import AgentState, Identity
from shoal.errors import ShoalError
from shoal.rollout.device import Scores
from shoal.training import events
from shoal.training.signals import Stop

LONGEST_CHUNK_S = 2.0  # a signal is answered within about this long; a crash costs `checkpoint_every`
CHUNKS = 100  # rows per agent over a run, where chunks are short enough


class Plan(NamedTuple):
    """What to run, in updates of a whole population."""

    agents: int  # without padding lanes
    updates: int  # in total, per agent
    steps_per_update: int  # env steps per agent
    chunk: int = 0  # updates per chunk; 0 = a hundredth of the run
    eval_every: int = 0  # updates between evaluations; 0 = none while training
    select_every: int = 0  # updates between selections; 0 = none
    stop_at: float | None = None  # mean return over agents at which to stop
    seconds: float | None = None  # of training, after which to stop
    checkpoint_every: float = 30.0  # seconds


class Tally(NamedTuple):
    """The run so far, as the host counts it; saved beside the state."""

    updates: int = 0
    train_s: float = 0.0
    evaluate_s: float = 0.0
    save_s: float = 0.0
    write_s: float = 0.0
    best_updates: int = -1  # of the evaluation with the highest mean return over agents
    best_return: float = float("-inf")
    total: int = 0  # updates that it was to do
    agent_updates: int = 0  # done by all agents together
    judged: tuple = ()  # what successive halving has judged so far; see `population.halving`


class Store(Protocol):
    """Where rows and states go."""

    def rows(self, columns: dict[str, Any]) -> None: ...
    def evaluation(self, columns: dict[str, Any]) -> None: ...
    def lineage(self, columns: dict[str, Any]) -> None: ...
    def save(self, state: AgentState, tally: Tally) -> None: ...


Hook = Callable[[events.Progress, AgentState], AgentState | None]
Listener = Callable[[events.Event], None]
Evaluate = Callable[[AgentState], tuple[Scores, Scores]]  # sampled and greedy, each [P, E]
# One row per agent replaced, and the event that tells of them.
Select = Callable[[AgentState, Tally], tuple[AgentState, Tally, dict[str, Any], events.Selected]]
# Names and values [P] of what differs between agents, for every row.
Varied = Callable[[AgentState], dict[str, np.ndarray]]


def train(
    plan: Plan,
    chunk: Callable[[AgentState, np.int32], tuple[AgentState, dict[str, Any]]],
    evaluate: Evaluate,
    state: AgentState,
    tally: Tally,
    store: Store,
    stop: Stop,
    listen: Listener = lambda event: None,
    hook: Hook | None = None,
    select: Select | None = None,
    varied: Varied = lambda state: {},
) -> tuple[AgentState, Tally]:
    """Train until the budget is spent or something asks to stop; the state is saved at the end.

    `hook` is called after every chunk with its Progress and the state, and may return another state of the
    same shapes. Returns the state and the tally; `stop` tells what ended it early, if anything did.
    """
    pace, saved_at = _Pace(plan), time.perf_counter()
    active = np.array(state.identity.active)[: plan.agents]
    tally = tally._replace(total=plan.updates)
    pending: dict[str, Any] | None = None
    while tally.updates < plan.updates and not stop:
        number = pace.next(tally.updates)
        state, tally, metrics, seconds = _timed(plan, chunk, state, tally, number, pending, store)
        pace.took(number, seconds)
        who = jax.tree.map(lambda x: np.array(x)[: plan.agents], state.identity)
        before, active = active, who.active
        pending, progress = _chunk_row(plan, tally, number, seconds, metrics, who)
        pending |= varied(state)
        for lane in np.flatnonzero(before & ~active):
            listen(events.Diverged(int(who.agent[lane]), int(who.updates[lane])))
        listen(progress)
        if hook is not None:
            try:
                state = _hooked(hook, progress, state)
            except Exception:  # the user's; what was trained so far is kept
                store.rows(pending)
                _save(store, state, tally, listen)
                raise
        if select and _due(plan.select_every, tally, plan):
            state, tally, replaced, event = select(state, tally)
            store.lineage(replaced)
            listen(event)
            active = np.array(state.identity.active)[: plan.agents]
        if _due(plan.eval_every, tally, plan):
            tally, columns = evaluated(plan, evaluate, state, tally, store, varied)
            returns = columns["return_mean"]
            listen(events.Evaluated(tally.updates, tally.updates * plan.steps_per_update, returns))
            _check_return(plan, returns, stop)
        elif not plan.eval_every:
            _check_return(plan, progress.returns, stop)
        _check_time(plan, tally, active, stop)
        if time.perf_counter() - saved_at > plan.checkpoint_every or tally.best_updates == tally.updates:
            store.rows(pending)
            pending = None
            tally = _save(store, state, tally, listen)
            saved_at = time.perf_counter()
    if stop:
        listen(events.Stopping(stop.reason))
    if pending is not None:
        store.rows(pending)
        tally = _save(store, state, tally, listen)
    return state, tally


def _timed(plan: Plan, chunk, state: AgentState, tally: Tally, number: int, pending, store: Store):
    """Run a chunk, and write the rows of the one before while it runs: state, tally, metrics [P], seconds."""
    started = time.perf_counter()
    state, metrics = chunk(state, np.int32(number))
    if pending is not None:
        store.rows(pending)
    wrote = time.perf_counter()
    metrics = {name: np.asarray(x)[: plan.agents] for name, x in jax.device_get(metrics).items()}
    seconds = time.perf_counter() - started
    tally = tally._replace(
        updates=tally.updates + number,
        agent_updates=tally.agent_updates + int(metrics["updates"].sum()),
        train_s=tally.train_s + seconds,
        write_s=tally.write_s + (wrote - started if pending is not None else 0.0),
    )
    return state, tally, metrics, seconds


def _due(every: int, tally: Tally, plan: Plan) -> bool:
    """Whether what happens every so many updates does now; nothing does at the end. 0 = never."""
    return bool(every) and tally.updates % every == 0 and tally.updates < plan.updates


def _hooked(hook: Hook, progress: events.Progress, state: AgentState) -> AgentState:
    """The state after the hook; ShoalError where what it returns is not such a state."""
    returned = hook(progress, state)
    if returned is None:
        return state
    # Compared as trees of shapes, in which the structure, every shape and every dtype count.
    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)
    if not isinstance(returned, type(state)) or shapes(returned) != shapes(state):
        raise ShoalError(
            f"the hook returned {type(returned).__name__}, not a state like the one it was given",
            "return None, or state._replace(…) with leaves of the same shapes and dtypes",
        )
    placed = lambda new, old: jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else new
    return jax.tree.map(placed, returned, state)


class _Pace:
    """How many updates the next chunk does: to the next multiple of the chunk, an evaluation or the end."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.chunk = plan.chunk or max(1, plan.updates // CHUNKS)
        self.seconds_per_update = 0.0  # of the quickest chunk; unknown before the first

    def next(self, done: int) -> int:
        size = self.chunk
        if not self.plan.chunk:
            if not self.seconds_per_update:
                return 1  # a first short one, to learn how long an update takes
            size = max(1, min(size, int(LONGEST_CHUNK_S / self.seconds_per_update)))
        ends = [done - done % size + size, self.plan.updates]
        for every in filter(None, (self.plan.eval_every, self.plan.select_every)):
            ends.append(done - done % every + every)
        return min(ends) - done

    def took(self, updates: int, seconds: float) -> None:
        each = seconds / updates
        self.seconds_per_update = min(each, self.seconds_per_update) if self.seconds_per_update else each


def _chunk_row(plan: Plan, tally: Tally, number: int, seconds: float, metrics, who: Identity):
    """The columns [P] of metrics.jsonl for one chunk, and its Progress.

    `updates` and `wall_s` are the run's, `env_steps` are the agent's own.
    """
    sums = dict(metrics)
    done, episodes = sums.pop("updates"), sums.pop("episodes")
    with np.errstate(divide="ignore", invalid="ignore"):
        returns, lengths = (sums.pop(name) / episodes for name in ("return_sum", "length_sum"))
        learned = {name: total / done for name, total in sums.items()}
    rate = float(done.sum()) * plan.steps_per_update / seconds
    columns = dict(
        env_steps=who.updates.astype(np.int64) * plan.steps_per_update,
        updates=np.full(plan.agents, tally.updates),
        wall_s=np.full(plan.agents, round(tally.train_s, 3)),
        agent=who.agent,
        episodes=episodes.astype(np.int64),
        return_mean=returns,
        length_mean=lengths,
        env_steps_per_s=np.full(plan.agents, round(rate, 1)),
        alive=who.active,
        **learned,
    )
    left = (plan.updates - tally.updates) * seconds / number
    if plan.seconds is not None:
        left = min(left, max(0.0, plan.seconds - tally.train_s))
    progress = events.Progress(
        tally.updates,
        plan.updates,
        tally.updates * plan.steps_per_update,
        rate,
        tally.train_s,
        left,
        returns,
        np.asarray(who.active),
    )
    return columns, progress


def evaluation_columns(
    plan: Plan, tally: Tally, state: AgentState, scores: tuple[Scores, Scores]
) -> dict[str, Any]:
    """The columns [P] of eval.jsonl; scores of the sampled and of the greedy policy, each [P, E]."""
    first = lambda tree: jax.tree.map(lambda x: np.asarray(x)[: plan.agents], tree)
    (sampled, greedy), who = map(first, scores), first(state.identity)
    return dict(
        env_steps=who.updates.astype(np.int64) * plan.steps_per_update,
        updates=np.full(plan.agents, tally.updates),
        wall_s=np.full(plan.agents, round(tally.train_s, 3)),
        agent=who.agent,
        episodes=np.full(plan.agents, sampled.returns.shape[1]),
        unfinished=np.sum(~sampled.finished, 1),
        return_mean=sampled.returns.mean(1),
        return_std=sampled.returns.std(1),
        return_greedy=greedy.returns.mean(1),
        length_mean=sampled.lengths.mean(1),
    )


def evaluated(
    plan: Plan,
    evaluate: Evaluate,
    state: AgentState,
    tally: Tally,
    store: Store,
    varied: Varied = lambda state: {},
) -> tuple[Tally, dict[str, Any]]:
    """Evaluate and store the columns [P]; the tally keeps the time and the best mean return."""
    started = time.perf_counter()
    columns = evaluation_columns(plan, tally, state, jax.device_get(evaluate(state))) | varied(state)
    store.evaluation(columns)
    score = _mean(columns["return_mean"])
    if score > tally.best_return:
        tally = tally._replace(best_return=score, best_updates=tally.updates)
    return tally._replace(evaluate_s=tally.evaluate_s + time.perf_counter() - started), columns


def _save(store: Store, state: AgentState, tally: Tally, listen: Listener) -> Tally:
    started = time.perf_counter()
    store.save(state, tally)
    listen(events.Saved(tally.updates))
    return tally._replace(save_s=tally.save_s + time.perf_counter() - started)


def _mean(returns: np.ndarray) -> float:
    """Over agents that have finished an episode; -inf where none has."""
    seen = returns[np.isfinite(returns)]
    return float(seen.mean()) if seen.size else float("-inf")


def _check_return(plan: Plan, returns: np.ndarray, stop: Stop) -> None:
    score = _mean(returns)
    if plan.stop_at is not None and score >= plan.stop_at:
        stop.ask(f"mean return {score:.4g} reached {plan.stop_at:g}", complete=True)


def _check_time(plan: Plan, tally: Tally, active: np.ndarray, stop: Stop) -> None:
    if plan.seconds is not None and tally.train_s >= plan.seconds:
        stop.ask(f"{plan.seconds:g} s of training are over", complete=True)
    if not active.any():
        stop.ask("every agent has diverged", complete=True)
