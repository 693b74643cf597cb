"""The page that a report is written on: its style, its plots as inline SVG, its numbers as text."""

import html
import io
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

# Matplotlib wants colours, the page wants variables that follow the reader's light or dark theme
INK, FAINT, ACCENT, SECOND = "#010101", "#020202", "#030303", "#040404"
THEME = {INK: "var(--ink)", FAINT: "var(--line)", ACCENT: "var(--accent)", SECOND: "var(--second)"}

SERIES = (ACCENT, SECOND, "#3c9d6e", "#c9a227", "#7d5ba6", "#8a96a3")


def number(value: Any, digits: int = 4) -> str:
    """1,250,000 · 487.2 · 0.0123 · – for what is unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f} s" if value < 100 else f"{int(value) // 60} min {int(value) % 60:02} s"


def escaped(value: Any) -> str:
    return html.escape(str(value), quote=False)


def listed(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def section(title: str, body: str, caption: str = "") -> str:
    caption = f'<p class="caption">{caption}</p>' if caption else ""
    return f"<section><h2>{title}</h2>{body}{caption}</section>"


def figure(name: str, draw: Callable[..., None], height: float, plots: int = 1, counts: bool = True) -> str:
    """An inline SVG of plots side by side, in the page's own colours and font. `name` keeps its ids apart.

    `draw` is given the axes of each plot; below the first are counts, written out, or else other numbers.
    """
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
        drawing = Figure(figsize=(8, height), layout="constrained")
        axes = drawing.subplots(1, plots, squeeze=False)[0]
        draw(*axes)
        if counts:
            axes[0].xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        drawing.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for attribute in ('id="', 'href="#', "url(#"):
        svg = svg.replace(attribute, f"{attribute}{name}-")
    for colour, variable in THEME.items():
        svg = svg.replace(colour, variable)
    return svg


def standing_alone(svg: str) -> str:
    """A figure as a file of its own: in the page's light colours, on white."""
    svg = re.sub(r"var\((--\w+)\)", lambda match: _light(match[1]), svg)
    return svg.replace(">", ' font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>', 1)


def _light(variable: str) -> str:
    return STYLE.partition(f"{variable}: ")[2].partition(";")[0]


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
