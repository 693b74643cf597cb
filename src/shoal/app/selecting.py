"""Who is replaced by whom between chunks: PBT and successive halving, as the loop calls them."""

from typing import Any

import jax
import numpy as np

from shoal.algos.update import AgentState
from shoal.app.assembly import Assembled, Compiler, starting
from shoal.population import halving
from shoal.population.lanes import identities
from shoal.population.search import value_of
from shoal.training import events, loop, program


def selector(made: Assembled, compiler: Compiler) -> loop.Select | None:
    """Compile what selects in this run; None where nothing does."""
    if made.settings.train.pbt:
        return _pbt(made, compiler)
    return _halving(made, compiler) if made.settings.train.halving else None


def varied(made: Assembled) -> loop.Varied:
    """Values in force of everything that differs between agents, by name."""
    first = lambda x: np.asarray(x)[: made.plan.agents]
    return lambda state: {axis.name: first(value_of(axis, state)) for axis in made.axes}


def _pbt(made: Assembled, compiler: Compiler) -> loop.Select:
    agents = made.plan.agents
    compiled = compiler("selection", lambda: program.compile_selection(made.recipe, made.layout, made.axes))
    knobs = varied(made)

    def select(state: AgentState, tally: loop.Tally):
        # Read before the next chunk starts: one program with collectives at a time.
        state, selected = compiled(state, np.int32(tally.updates))
        selected = jax.tree.map(lambda x: np.asarray(x)[:agents], selected)
        ids = np.asarray(state.identity.agent)[:agents]
        lanes = np.flatnonzero(selected.parent != np.arange(agents))
        parents = selected.parent[lanes]
        rows = _rows(tally, ids[lanes], ids[lanes], selected.score[lanes], knobs(state), lanes)
        rows |= dict(parent=ids[parents], parent_score=selected.score[parents])
        event = events.Selected(tally.updates, len(lanes), agents, "copies of better ones")
        return state, tally, rows, event

    return select


def _halving(made: Assembled, compiler: Compiler) -> loop.Select:
    agents, lanes, total = made.plan.agents, made.layout.lanes, made.plan.updates
    seed, knobs = made.settings.train.seed, varied(made)
    refill = compiler("refill", lambda: program.compile_refill(made.recipe, made.layout))
    score = compiler("scores", lambda: program.compile_scores(made.recipe, made.layout))

    def select(state: AgentState, tally: loop.Tally):
        who = jax.tree.map(np.array, state.identity)
        scores = np.array(score(state))
        stopped, judged = halving.judge(tally.judged, total, total - tally.updates, who.updates, scores)
        places = np.flatnonzero(stopped)
        first = max(agents, int(who.agent[who.budget > 0].max()) + 1)
        ids = who.agent.copy()
        ids[places] = first + np.arange(len(places), dtype=np.int32)
        fresh = identities(seed, lanes, total - tally.updates, lanes)._replace(agent=ids)
        state = refill(state, stopped, fresh, *starting(made, ids))
        rows = _rows(tally, ids[places], who.agent[places], scores[places], knobs(state), places)
        rows |= dict(parent=np.full(len(places), np.nan), parent_score=np.full(len(places), np.nan))
        event = events.Selected(tally.updates, len(places), agents, "new samples")
        return state, tally._replace(judged=tuple(map(tuple, judged))), rows, event

    return select


def _rows(
    tally: loop.Tally,
    agent: np.ndarray,
    replaced: np.ndarray,
    score: np.ndarray,
    knobs: dict[str, np.ndarray],
    lanes: np.ndarray,
) -> dict[str, Any]:
    """Columns of lineage.jsonl: who came, instead of whom, what that one had scored, and the new knobs."""
    rows = dict(updates=np.full(len(agent), tally.updates), agent=agent, replaced=replaced, score=score)
    return rows | {name: values[lanes] for name, values in knobs.items()}
