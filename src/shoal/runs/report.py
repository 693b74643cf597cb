"""The report: one offline HTML page about one run, made from the files of its folder alone.

Whatever is missing (an unfinished run, no episode yet, no video) leaves its part out, never the page.
"""

import base64
import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import ShoalError
from shoal.runs import manifest
from shoal.runs.folder import RunFolder, status
from shoal.runs.lineage import knobs, lineage, programs
from shoal.runs.manifest import write_atomic
from shoal.runs.metrics import read_rows
from shoal.runs.page import (
    ACCENT,
    INK,
    PAGE,
    SECOND,
    STYLE,
    escaped,
    figure,
    listed,
    number,
    seconds,
    section,
)

INLINE_BYTES = 3_000_000  # a larger video is linked, not embedded
POINTS = 300  # a finer learning curve would not show on the page


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` of a run, finished or not, and return its path; about 1 s."""
    facts = manifest.read_object(folder.manifest) if folder.manifest.exists() else {}
    result = facts.get("result") or {}
    rows, evaluations = (_rows(path, "env_steps", "agent") for path in (folder.metrics, folder.eval))
    scores = _final_scores(result, evaluations)
    parts = [
        _header(folder, facts, result),
        _notices(folder, facts, rows),
        _headline(result),
        _learning_curve(rows, evaluations),
        _scores(scores, result),
        programs(result),
        knobs(result),
        lineage(
            _rows(folder.lineage, "updates", "agent", "parent", "replaced"),
            rows,
            result,
            facts.get("varied") or {},
        ),
        _video(folder),
        _time_split(facts.get("time_split") or {}),
        _method(facts, result, evaluations),
        _settings(folder),
        _machine(facts),
        _reproduce(facts),
    ]
    page = PAGE.format(title=html.escape(folder.name), style=STYLE, body="\n".join(filter(None, parts)))
    write_atomic(folder.report, page)
    return folder.report


def _rows(path: Path, *needed: str) -> dict[str, np.ndarray]:
    rows = read_rows(path)
    if rows and (missing := set(needed) - set(rows)):
        raise ShoalError(f"{path} is damaged: its rows have no {', '.join(sorted(missing))}")
    return rows


# --- Sections: each an HTML string, "" where there is nothing to say -----------------------------


def _header(folder: RunFolder, facts: Mapping, result: Mapping) -> str:
    what = [result.get("algo", facts.get("algo")), result.get("env", facts.get("env"))]
    agents = result.get("agents", facts.get("agents"))
    words = [" on ".join(str(part) for part in what if part)]
    words += [f"{agents} agent{'s' * (agents != 1)}"] if agents else []
    words += [str(facts["started"])[:10]] if facts.get("started") else []
    return (
        f"<header><h1>{escaped(folder.name)}</h1><p>{escaped(' · '.join(filter(None, words)))}</p></header>"
    )


def _notices(folder: RunFolder, facts: Mapping, rows: Mapping[str, np.ndarray]) -> str:
    notices = list(facts.get("notes") or [])
    if not facts.get("finished"):
        live = status(folder) == "live"
        notices.append("This run is still training." if live else "This run has not finished.")
    if (reason := (facts.get("result") or {}).get("stopped_early")) is not None:
        notices.append(f"Stopped before its budget was spent: {reason}.")
    if "alive" in rows:
        frozen, agents = np.unique(rows["agent"][rows["alive"] == 0]), np.unique(rows["agent"])
        if frozen.size:
            named = ", ".join(map(str, frozen[:20])) + (", …" if len(frozen) > 20 else "")
            notices.append(f"Diverged and frozen, {len(frozen)} of {len(agents)}: agent {named}.")
    return "".join(f'<p class="notice">{escaped(notice)}</p>' for notice in notices)


def _headline(result: Mapping) -> str:
    if not result:
        return ""
    low, high = result.get("return_ci") or (None, None)
    interval = f"95 % interval {number(low)} – {number(high)}" if low is not None else "mean of the agents"
    best = []
    if result.get("varied") and (returns := np.array(result.get("returns"), float)).size:
        best = [
            ("Best agent", number(np.nanmax(returns, initial=-np.inf)), f"agent {result.get('best_agent')}")
        ]
    tiles = [
        *best,
        ("Return", number(result.get("return_mean")), interval),
        ("Interquartile mean", number(result.get("return_iqm")), "of the agents' returns"),
        ("Greedy return", number(result.get("return_greedy")), "without exploration noise"),
        ("Env steps", number(result.get("env_steps")), "of all agents together"),
        ("Speed", number(result.get("env_steps_per_s"), 3), "env steps per second, compile apart"),
        (
            "Total time",
            seconds(result.get("total_s")),
            f"of it compiling: {seconds(result.get('compile_s'))}",
        ),
    ]
    cards = (f"<div><h3>{a}</h3><b>{escaped(b)}</b><small>{escaped(c)}</small></div>" for a, b, c in tiles)
    return f'<section class="tiles">{"".join(cards)}</section>'


def _learning_curve(rows: Mapping[str, np.ndarray], evaluations: Mapping[str, np.ndarray]) -> str:
    steps, returns = _curve(rows)
    eval_steps, eval_returns = _curve(evaluations)
    if not steps.size and not eval_steps.size:
        return section("Learning curve", "<p>No episode has finished yet.</p>") if rows else ""

    def draw(axes: Any) -> None:
        if steps.size:
            low, lower, middle, upper, high = np.nanquantile(returns, [0, 0.25, 0.5, 0.75, 1], axis=1)
            if returns.shape[1] > 1:
                axes.fill_between(steps, low, high, color=ACCENT, alpha=0.12, lw=0, label="min – max")
                axes.fill_between(steps, lower, upper, color=ACCENT, alpha=0.28, lw=0, label="middle half")
            mark = "o" if len(steps) < 3 else None
            axes.plot(steps, middle, color=ACCENT, lw=1.8, marker=mark, label="median, training")
        if eval_steps.size:
            middle = np.nanmedian(eval_returns, axis=1)
            axes.plot(eval_steps, middle, "o", color=SECOND, ms=5, label="median, evaluation")
        axes.set_xlabel("env steps per agent")
        axes.set_ylabel("episode return")
        axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=INK)

    return section("Learning curve", figure("curve", draw, 3.4))


def _scores(scores: np.ndarray, result: Mapping) -> str:
    agents = np.argsort(scores)[: np.isfinite(scores).sum()]  # worst first; NaN, last, left out
    if not agents.size:
        return ""
    ordered = scores[agents]

    def draw(axes: Any) -> None:
        ranks = np.arange(1, len(ordered) + 1)
        if result.get("return_ci"):
            axes.axhspan(
                *result["return_ci"], color=SECOND, alpha=0.18, lw=0, label="95 % interval of the mean"
            )
        axes.axhline(ordered.mean(), color=SECOND, lw=1.2, label="mean")
        axes.plot(ranks, ordered, "o", color=ACCENT, ms=6 if len(ordered) < 100 else 3)
        axes.set_xlim(0.5, len(ordered) + 0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("agents, from worst to best")
        axes.set_ylabel("final return")
        axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=INK)

    ids = result.get("agent_ids") or range(len(scores))
    best = result.get("best_agent", ids[agents[-1]])
    caption = f"Best: agent {best} with {number(ordered[-1])}. "
    caption += f"Worst: agent {ids[agents[0]]} with {number(ordered[0])}. " if len(agents) > 1 else ""
    if missing := len(scores) - len(agents):
        caption += f"Without a score: {missing}."
    return section("Final score of each agent", figure("scores", draw, 2.6), caption)


def _video(folder: RunFolder) -> str:
    for name, tag in (
        ("video.mp4", '<video controls loop muted src="{}"></video>'),
        ("video.gif", '<img alt="Episodes of trained agents" src="{}">'),
    ):
        path = folder.path / name
        if path.is_file():
            source = name
            if path.stat().st_size <= INLINE_BYTES:
                kind = "video/mp4" if name.endswith("mp4") else "image/gif"
                source = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
            return section("Trained agents", tag.format(source), f'<a href="{name}">{name}</a>')
    return ""


def _time_split(split: Mapping[str, float]) -> str:
    parts = [(name, seconds) for name, seconds in split.items() if seconds]
    total = sum(seconds for _, seconds in parts)
    if not total:
        return ""
    bars = "".join(f'<i class="c{i % 6}" style="flex:{s / total:.4f}"></i>' for i, (_, s) in enumerate(parts))
    legend = "".join(
        f'<li><i class="c{i % 6}"></i>{escaped(name)} <b>{seconds(s)}</b> {s / total:.0%}</li>'
        for i, (name, s) in enumerate(parts)
    )
    return section("Where the time went", f'<div class="split">{bars}</div><ul class="legend">{legend}</ul>')


def _method(facts: Mapping, result: Mapping, evaluations: Mapping[str, np.ndarray]) -> str:
    agents, steps = (
        facts.get("agents", result.get("agents")),
        result.get("env_steps_per_agent", facts.get("steps")),
    )
    if not agents:
        return ""
    text = f"{agents} {'agents' if agents != 1 else 'agent'} learned side by side in "
    several = len(facts.get("programs") or ())
    text += f"{several} compiled programs, run one after the other" if several else "one compiled program"
    text += f", each with random streams of its own derived from seed {facts.get('seed')} and its number"
    text += f", for {steps:,} env steps each." if steps else "."
    if several:
        text += " Agent 1/0 is the first of the second program."
    if facts.get("pbt"):
        text += (
            " In every selection the worst quarter became copies of the best, with knobs moved: agents are"
            " not independent, so there is no interval."
        )
    if facts.get("halving"):
        text += (
            " An agent that was not in the best third of all judged at its age made room for a new sample:"
            " agents of the end have had unequal numbers of steps, and their mean says less than the best."
        )
    text += (
        " Returns are undiscounted sums of the env's own rewards, before any normalisation. The learning"
        " curve shows the training episodes that finished in each interval, of the exploring policy: median,"
        " middle half and range over agents."
    )
    if "episodes" in evaluations:
        text += (
            f" Final scores are means over {int(evaluations['episodes'][-1])} evaluation episodes per agent,"
            " of the policy as it acts in training; “greedy” takes its most likely action instead."
        )
    text += (
        " An interval is a 95 % percentile bootstrap over agents, and the interquartile mean is that of"
        " Agarwal et al. (2021). An agent whose numbers stopped being finite was frozen there; its neighbours"
        " were not touched."
    )
    return section("Method", f"<p>{escaped(text)}</p>")


def _settings(folder: RunFolder) -> str:
    """The settings file as it is, every value with its origin as the comment behind it."""
    if not folder.config.exists():
        return ""
    text = escaped(folder.config.read_text("utf-8"))
    text = re.sub(r"(  # [^#\n]*)$", r"<span>\1</span>", text, flags=re.M)
    return section("Settings", f"<pre>{text}</pre>", "Behind each value: where it came from.")


def _machine(facts: Mapping) -> str:
    shown = ("device", "device_kind", "devices", "mesh", "precision", "reset", "seed", "fingerprint")
    table = {
        name: facts[name] for name in (*shown, "python", "platform", "cpus") if facts.get(name) is not None
    }
    table |= facts.get("packages") or {}
    for i, again in enumerate(facts.get("resumed") or [], 1):
        table[f"resumed ({i})"] = f"{again.get('started')}, after {again.get('updates')} updates"
    lines = (
        f"<tr><th>{escaped(name.replace('_', ' '))}</th><td>{escaped(listed(value))}</td></tr>"
        for name, value in table.items()
    )
    return section("Device and versions", f"<table>{''.join(lines)}</table>") if table else ""


def _reproduce(facts: Mapping) -> str:
    if not facts.get("command"):
        return ""
    git = facts.get("git")
    where = f"# in a checkout of {git['commit']}{' with local changes' * git['dirty']}\n" if git else ""
    return section("Reproduce", f"<pre><span>{escaped(where)}</span>{escaped(facts['command'])}</pre>")


# --- Numbers -----------------------------------------------------------------------------------


def _final_scores(result: Mapping, evaluations: Mapping[str, np.ndarray]) -> np.ndarray:
    """Each agent's final return [P], NaN for none; of an unfinished run, its newest evaluation."""
    if result.get("returns"):
        return np.array(result["returns"], float)
    _, returns = _curve(evaluations)
    return returns[-1] if len(returns) else np.empty(0)


def _curve(rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Env steps [points] and returns [points, P] of rows, without points at which no agent has a return."""
    if "return_mean" not in rows:
        return np.empty(0), np.empty((0, 0))
    agents, agent = np.unique(rows["agent"], return_inverse=True)
    steps, point = np.unique(rows["env_steps"], return_inverse=True)
    returns = np.full((len(steps), len(agents)), np.nan)
    returns[point, agent] = (
        np.where(rows["alive"] != 0, rows["return_mean"], np.nan)
        if "alive" in rows
        else (rows["return_mean"])
    )
    seen = np.isfinite(returns).any(axis=1)
    return _thinned(steps[seen], returns[seen])


def _thinned(steps: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `POINTS` points, each agent's returns averaged over the points merged."""
    groups = np.array_split(np.arange(len(steps)), min(POINTS, len(steps)) or 1)
    if len(groups) == len(steps):
        return steps, returns
    counts = np.array([np.isfinite(returns[group]).sum(axis=0) for group in groups])
    sums = np.array([np.nansum(returns[group], axis=0) for group in groups])
    merged = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return np.array([steps[group[-1]] for group in groups if len(group)]), merged
