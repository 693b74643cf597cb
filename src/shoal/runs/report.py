"""The report: one offline HTML page about one run, made from the files of its folder alone.

Whatever is missing (an unfinished run, no episode yet, no video) leaves its part out, never the page.
"""

import base64
import html
import io
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import ShoalError
from shoal.runs import manifest
from shoal.runs.folder import RunFolder, status
from shoal.runs.manifest import write_atomic
from shoal.runs.metrics import read_rows

INLINE_BYTES = 3_000_000  # a larger video is linked, not embedded
POINTS = 300  # a finer learning curve would not show on the page

# Matplotlib wants colours, the page wants variables that follow the reader's light or dark theme
INK, FAINT, ACCENT, SECOND = "#010101", "#020202", "#030303", "#040404"
THEME = {INK: "var(--ink)", FAINT: "var(--line)", ACCENT: "var(--accent)", SECOND: "var(--second)"}


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` of a run, finished or not, and return its path; about 1 s."""
    facts = manifest.read_object(folder.manifest) if folder.manifest.exists() else {}
    result = facts.get("result") or {}
    rows, evaluations = _rows(folder.metrics), _rows(folder.eval)
    scores = _final_scores(result, evaluations)
    parts = [
        _header(folder, facts, result),
        _notices(folder, facts, rows),
        _headline(result),
        _learning_curve(rows, evaluations),
        _scores(scores, result),
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


def _rows(path: Path) -> dict[str, np.ndarray]:
    rows = read_rows(path)
    if rows and (missing := {"env_steps", "agent"} - set(rows)):
        raise ShoalError(f"{path} is damaged: its rows have no {', '.join(sorted(missing))}")
    return rows


# --- Sections: each an HTML string, "" where there is nothing to say -----------------------------


def _header(folder: RunFolder, facts: Mapping, result: Mapping) -> str:
    what = [result.get("algo", facts.get("algo")), result.get("env", facts.get("env"))]
    agents = result.get("agents", facts.get("agents"))
    words = [" on ".join(str(part) for part in what if part)]
    words += [f"{agents} agent{'s' * (agents != 1)}"] if agents else []
    words += [str(facts["started"])[:10]] if facts.get("started") else []
    return f"<header><h1>{_text(folder.name)}</h1><p>{_text(' · '.join(filter(None, words)))}</p></header>"


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
    return "".join(f'<p class="notice">{_text(notice)}</p>' for notice in notices)


def _headline(result: Mapping) -> str:
    if not result:
        return ""
    low, high = result.get("return_ci") or (None, None)
    interval = f"95 % interval {_number(low)} – {_number(high)}" if low is not None else "mean of the agents"
    tiles = [
        ("Return", _number(result.get("return_mean")), interval),
        ("Interquartile mean", _number(result.get("return_iqm")), "of the agents' returns"),
        ("Greedy return", _number(result.get("return_greedy")), "without exploration noise"),
        ("Env steps", _number(result.get("env_steps")), "of all agents together"),
        ("Speed", _number(result.get("env_steps_per_s"), 3), "env steps per second, compile apart"),
        (
            "Total time",
            _seconds(result.get("total_s")),
            f"of it compiling: {_seconds(result.get('compile_s'))}",
        ),
    ]
    cards = (f"<div><h3>{a}</h3><b>{_text(b)}</b><small>{_text(c)}</small></div>" for a, b, c in tiles)
    return f'<section class="tiles">{"".join(cards)}</section>'


def _learning_curve(rows: Mapping[str, np.ndarray], evaluations: Mapping[str, np.ndarray]) -> str:
    steps, returns = _curve(rows)
    eval_steps, eval_returns = _curve(evaluations)
    if not steps.size and not eval_steps.size:
        return _section("Learning curve", "<p>No episode has finished yet.</p>") if rows else ""

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

    return _section("Learning curve", _figure("curve", draw, 3.4))


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

    caption = f"Best: agent {agents[-1]} with {_number(ordered[-1])}. "
    caption += f"Worst: agent {agents[0]} with {_number(ordered[0])}. " if len(agents) > 1 else ""
    if missing := len(scores) - len(agents):
        caption += f"Without a score: {missing}."
    return _section("Final score of each agent", _figure("scores", draw, 2.6), caption)


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
            return _section("Trained agents", tag.format(source), f'<a href="{name}">{name}</a>')
    return ""


def _time_split(split: Mapping[str, float]) -> str:
    parts = [(name, seconds) for name, seconds in split.items() if seconds]
    total = sum(seconds for _, seconds in parts)
    if not total:
        return ""
    bars = "".join(f'<i class="c{i % 6}" style="flex:{s / total:.4f}"></i>' for i, (_, s) in enumerate(parts))
    legend = "".join(
        f'<li><i class="c{i % 6}"></i>{_text(name)} <b>{_seconds(s)}</b> {s / total:.0%}</li>'
        for i, (name, s) in enumerate(parts)
    )
    return _section("Where the time went", f'<div class="split">{bars}</div><ul class="legend">{legend}</ul>')


def _method(facts: Mapping, result: Mapping, evaluations: Mapping[str, np.ndarray]) -> str:
    agents, steps = (
        facts.get("agents", result.get("agents")),
        result.get("env_steps_per_agent", facts.get("steps")),
    )
    if not agents:
        return ""
    text = f"{agents} {'agents' if agents != 1 else 'agent'} learned side by side in one compiled program"
    text += f", each with random streams of its own derived from seed {facts.get('seed')} and its number"
    text += f", for {steps:,} env steps each." if steps else "."
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
        " The interval is a 95 % percentile bootstrap over agents, and the interquartile mean is that of"
        " Agarwal et al. (2021). An agent whose numbers stopped being finite was frozen there; its neighbours"
        " were not touched."
    )
    return _section("Method", f"<p>{_text(text)}</p>")


def _settings(folder: RunFolder) -> str:
    """The settings file as it is, every value with its origin as the comment behind it."""
    if not folder.config.exists():
        return ""
    text = re.sub(r"(  # [^#\n]*)$", r"<span>\1</span>", _text(folder.config.read_text("utf-8")), flags=re.M)
    return _section("Settings", f"<pre>{text}</pre>", "Behind each value: where it came from.")


def _machine(facts: Mapping) -> str:
    shown = ("device", "device_kind", "devices", "mesh", "precision", "reset", "seed", "fingerprint")
    table = {
        name: facts[name] for name in (*shown, "python", "platform", "cpus") if facts.get(name) is not None
    }
    table |= facts.get("packages") or {}
    for number, again in enumerate(facts.get("resumed") or [], 1):
        table[f"resumed ({number})"] = f"{again.get('started')}, after {again.get('updates')} updates"
    lines = (
        f"<tr><th>{_text(name.replace('_', ' '))}</th><td>{_text(_listed(value))}</td></tr>"
        for name, value in table.items()
    )
    return _section("Device and versions", f"<table>{''.join(lines)}</table>") if table else ""


def _reproduce(facts: Mapping) -> str:
    if not facts.get("command"):
        return ""
    git = facts.get("git")
    where = f"# in a checkout of {git['commit']}{' with local changes' * git['dirty']}\n" if git else ""
    return _section("Reproduce", f"<pre><span>{_text(where)}</span>{_text(facts['command'])}</pre>")


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


def _number(value: Any, digits: int = 4) -> str:
    """1,250,000 · 487.2 · 0.0123 · – for what is unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f} s" if value < 100 else f"{int(value) // 60} min {int(value) % 60:02} s"


# --- HTML --------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    return html.escape(str(value), quote=False)


def _listed(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _section(title: str, body: str, caption: str = "") -> str:
    caption = f'<p class="caption">{caption}</p>' if caption else ""
    return f"<section><h2>{title}</h2>{body}{caption}</section>"


def _figure(name: str, draw: Callable[[Any], None], height: float) -> str:
    """An inline SVG of one plot, in the page's own colours and font. `name` keeps its ids apart."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
        "svg.hashsalt": name,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.use_mathtext": False,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
    }
    with matplotlib.rc_context(style), io.StringIO() as file:
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for attribute in ('id="', 'href="#', "url(#"):
        svg = svg.replace(attribute, f"{attribute}{name}-")
    for colour, variable in THEME.items():
        svg = svg.replace(colour, variable)
    return svg


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""

STYLE = """
:root { --ink: #1d2733; --muted: #687585; --line: #dde3ea; --back: #fff; --card: #f6f8fa;
  --accent: #1668b8; --second: #d9622b; color-scheme: light dark }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf1; --muted: #94a2b3; --line: #36414e;
  --back: #12171d; --card: #1b222b; --accent: #5aaaf2; --second: #f29059 } }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 860px; margin: 0 auto; padding: 36px 20px 60px }
h1 { font-size: 28px; margin: 0; letter-spacing: -.02em }
h2 { font-size: 17px; margin: 36px 0 10px }
h3 { font-size: 12px; font-weight: 500; color: var(--muted); margin: 0 }
header p, .caption, small { color: var(--muted); margin: 2px 0 0 }
.caption, small { font-size: 12.5px; line-height: 1.35 }
.notice { border-left: 3px solid var(--second); background: var(--card); padding: 8px 14px; margin: 14px 0 0 }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 12px;
  margin-top: 24px }
.tiles div { background: var(--card); border-radius: 8px; padding: 12px 16px }
.tiles b { display: block; font-size: 24px; line-height: 1.3; font-weight: 600;
  font-variant-numeric: tabular-nums }
.tiles small { display: block }
svg { width: 100%; height: auto } svg text { font-family: inherit !important }
video, section > img { max-width: 100%; border-radius: 8px }
.split { display: flex; height: 22px; border-radius: 6px; overflow: hidden; gap: 1px }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 22px; padding: 0; margin: 10px 0 0 }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px }
.c0 { background: #d9622b } .c1 { background: #1668b8 } .c2 { background: #3c9d6e }
.c3 { background: #c9a227 } .c4 { background: #7d5ba6 } .c5 { background: #8a96a3 }
i { print-color-adjust: exact; -webkit-print-color-adjust: exact }
pre { background: var(--card); border-radius: 8px; padding: 12px 16px; overflow-x: auto;
  font-size: 12.5px; margin: 0 }
pre span { color: var(--muted) }
table { border-collapse: collapse; width: 100%; font-size: 13.5px }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); font-weight: 400 }
th { color: var(--muted); width: 30% } td { overflow-wrap: anywhere }
a { color: var(--accent) }
@media print { main { max-width: none; padding: 0 } section, .tiles div { break-inside: avoid }
  pre { white-space: pre-wrap } }
"""
