"""The report's pictures of a search: score against each knob, and who was replaced by whom."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.runs.page import ACCENT, FAINT, INK, SECOND, SERIES, escaped, figure, number, section

LOG_RATIO = 20  # values further apart than this are drawn on a logarithmic axis
PLOTS = 3  # side by side


def programs(result: Mapping[str, Any]) -> str:
    """The programs of a sweep over shapes, best first, each with a link to its own report."""
    if not result.get("programs"):
        return ""
    rows = sorted(enumerate(result["programs"]), key=lambda row: -row[1]["return_mean"])
    lines = (
        f'<tr><th><a href="programs/{i}/report.html">{escaped(one["program"])}</a></th>'
        f"<td>{number(one['return_mean'])}</td><td>{number(one['return_iqm'])}</td>"
        f"<td>{one['agents']}</td><td>{number(one['env_steps_per_s'], 3)}</td></tr>"
        for i, one in rows
    )
    names = ("return", "interquartile mean", "agents", "steps/s")
    head = f"<tr><th>program</th>{''.join(f'<td>{name}</td>' for name in names)}</tr>"
    return section("Programs", f"<table>{head}{''.join(lines)}</table>")


def knobs(result: Mapping[str, Any]) -> str:
    """Each agent's final return against what it had in the end: one plot per knob, or setting that shapes.

    Where there are a few programs, each has its colour.
    """
    returns = np.array(result.get("returns") or [], float)
    columns = {n: x for n, x in (result.get("varied") or {}).items() if len(x) == len(returns)}
    programs = [(one["program"], one["agents"]) for one in result.get("programs") or ()]
    named = 1 < len(programs) <= len(SERIES) and sum(agents for _, agents in programs) == len(returns)
    groups = programs if named else [("", len(returns))]
    rows = [list(columns.items())[i : i + PLOTS] for i in range(0, len(columns), PLOTS)]
    body = "".join(_scatter(row, returns, groups) for row in rows)
    return section("Score against each knob", body) if rows else ""


def _scatter(row: list[tuple[str, list]], returns: np.ndarray, groups: list[tuple[str, int]]) -> str:
    ends = np.cumsum([agents for _, agents in groups])

    def draw(*plots: Any) -> None:
        for axes, (name, column) in zip(plots, row):
            words = list(dict.fromkeys(x for x in column if isinstance(x, str)))
            values = np.array([words.index(x) for x in column] if words else column, float)
            if words:
                axes.set_xticks(range(len(words)), words)
                axes.margins(x=0.2)
            elif values.min() > 0 and values.max() / values.min() > LOG_RATIO:
                axes.set_xscale("log")
            for end, (label, agents), colour in zip(ends, groups, SERIES):
                shown = slice(end - agents, end)
                size = 5 if len(returns) < 100 else 3
                axes.plot(values[shown], returns[shown], "o", color=colour, ms=size, alpha=0.7, label=label)
            axes.set_xlabel(name)
        plots[0].set_ylabel("final return")
        if len(groups) > 1:
            plots[0].legend(loc="best", frameon=False, fontsize=9, labelcolor=INK)

    return figure("knobs-" + row[0][0].replace(".", "-"), draw, 2.8, len(row), counts=False)


def lineage(
    replaced: Mapping[str, np.ndarray],
    rows: Mapping[str, np.ndarray],
    result: Mapping[str, Any],
    varied: Mapping[str, Any],
) -> str:
    """Who was replaced by whom; `replaced`: columns of lineage.jsonl, `rows`: those of metrics.jsonl."""
    if not len(replaced.get("agent", ())) or "updates" not in rows:
        return ""
    copied = np.isfinite(replaced["parent"].astype(float))
    body = _ancestry(replaced, rows, result) if copied.any() else _lives(replaced, rows)
    times = len(np.unique(replaced["updates"]))
    what = "copies of better ones" if copied.any() else "new samples"
    moved = f" Knobs: {', '.join(map(escaped, varied))}." if varied else ""
    number = len(replaced["agent"])
    caption = f"{number} agents replaced by {what} in {times} selections.{moved} All are in lineage.jsonl."
    return section("Lineage", body, caption)


def _ancestry(replaced: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray], result: Mapping) -> str:
    """One line per agent over updates; copies join their parent's, the best agent's past stands out."""
    agents, end = np.unique(rows["agent"]), int(rows["updates"].max())
    updates, child, parent = (replaced[name].astype(int) for name in ("updates", "agent", "parent"))
    path = ancestors(updates, child, parent, int(result.get("best_agent", agents[0])), end)

    def draw(axes: Any) -> None:
        axes.hlines(agents, 0, end, color=FAINT, lw=0.8)
        axes.vlines(updates, np.minimum(child, parent), np.maximum(child, parent), color=FAINT, lw=0.6)
        axes.plot(updates, child, "o", color=ACCENT, ms=3, label="became a copy", ls="")
        times = np.repeat([start for start, _ in path] + [end], 2)[1:-1]
        axes.plot(
            times, np.repeat([who for _, who in path], 2), color=SECOND, lw=2, label="the best agent's past"
        )
        _labelled(axes)
        axes.grid(visible=False)

    return figure("lineage", draw, 3.4)


def ancestors(
    updates: np.ndarray, child: np.ndarray, parent: np.ndarray, agent: int, end: int
) -> list[tuple[int, int]]:
    """From when on the state that `agent` has at `end` was whose: [(0, first agent), …, (update, agent)]."""
    path: list[tuple[int, int]] = []
    for when, who, source in sorted(zip(updates, child, parent), key=lambda row: -row[0]):
        if who == agent and when < end:
            path.append((int(when), agent))
            agent, end = int(source), int(when)
    return [(0, agent), *reversed(path)]


def _lives(replaced: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray]) -> str:
    """One bar per agent from its first to its last update, in the order they came."""
    agents, place = np.unique(rows["agent"], return_inverse=True)
    first, last = np.full(len(agents), rows["updates"].max()), np.zeros(len(agents), int)
    np.minimum.at(first, place, rows["updates"])
    np.maximum.at(last, place, rows["updates"])
    stopped = np.isin(agents, replaced["replaced"])

    def draw(axes: Any) -> None:
        axes.hlines(agents[stopped], first[stopped], last[stopped], color=ACCENT, lw=1.2, label="stopped")
        axes.hlines(agents[~stopped], first[~stopped], last[~stopped], color=SECOND, lw=2, label="went on")
        _labelled(axes)

    return figure("lineage", draw, 3.4)


def _labelled(axes: Any) -> None:
    axes.set_xlabel("updates")
    axes.set_ylabel("agent")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9, labelcolor=INK)
