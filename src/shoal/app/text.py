"""Numbers, rows and records as people and scripts read them. Data goes to stdout."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

SPARKS = "▁▂▃▄▅▆▇█"


def count(number: float, space: str = "") -> str:
    """500k, 8M, 1.25M: three digits."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * scale:
            return f"{number / scale:.3g}{space}{unit}"
    return f"{number:.3g}{space}"


def size(number: float) -> str:
    """Bytes, in decimal units: 12 B, 4.5 MB."""
    return f"{count(number, ' ')}B"


def duration(seconds: float) -> str:
    """4.2 s, 37 s, 3 min 05 s, 2 h 10 min."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def score(number: float | None) -> str:
    """A return: one decimal; a dash where there is none."""
    return "–" if number is None or math.isnan(number) else f"{number:.1f}"


def sparkline(numbers: Sequence[float], width: int = 40) -> str:
    """The course of a number in one line; gaps where there was none."""
    step = max(1, math.ceil(len(numbers) / width))
    shown = numbers[::-step][::-1]
    finite = [x for x in shown if math.isfinite(x)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    mark = lambda x: SPARKS[int((x - low) / span * (len(SPARKS) - 1) + 0.5)]
    return "".join(mark(x) if math.isfinite(x) else " " for x in shown)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows under their keys, aligned; numbers to the right. Never cut: a script may read it too."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[str(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    right = [all(_is_number(row[name]) for row in rows) for name in names]
    aligned = lambda line: "  ".join(
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(line, widths, right)
    ).rstrip()
    return "\n".join(map(aligned, [names, *cells]))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same as a Markdown table; thousands are set apart."""
    if not rows:
        return ""
    shown = lambda x: f"{x:,}" if isinstance(x, int) else "–" if x is None else str(x)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([shown(x) for x in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def json_line(value: Any) -> str:
    """One line of strict JSON."""
    from shoal.runs.manifest import to_json

    return to_json(value)


def _is_number(value: Any) -> bool:
    return re.match(r"-?\d|–$", str(value)) is not None
