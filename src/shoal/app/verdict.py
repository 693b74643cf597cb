"""What `modes` measured: a row for each mode, whether they agree, what to do, and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.app import text
from shoal.app.modes import COMPARED_UPDATES, Compared, Turn
from shoal.app.utilisation import mps_is_on
from shoal.runs import statistics
from shoal.runs.manifest import write_atomic
from shoal.runs.page import ACCENT, figure, standing_alone

Row = dict[str, Any]

TOLERANCE = 1e-4  # of parameters, relative to those above 1
AS_FAST = 1.03  # times the wall time: noise
WORDS = {
    "sequential": "one after another on one device",
    "concurrent": "as processes of their own",
    "fused": "in one program on one device",
    "sharded": "in one program over {devices} devices",
    "data": "one after another, each over {devices} devices",
}


def rows(of: Compared, apart: dict[str, str]) -> list[Row]:
    """A row for each mode, with the settings that set this comparison apart; medians over rounds.

    slowdown: the time that an agent takes from its own start to its own end in this mode, against the time
        that one takes alone on one device with nothing beside it, which is `sequential`'s: 1 by definition.
        An agent of a fused population takes as long as all of it, one among processes as long as its own.
    peak_bytes: of the accelerators, or on a CPU of the processes that ran at the same time, since each had
        compiled. host_bytes: of the processes, likewise.
    efficiency: env steps/s against those of the better mode on one device, times this mode's devices.
    utilisation: cpu_s, the CPU time of all processes, against that of all cores; of GPUs what NVML says.
    """
    steps = of.settings.train.agents * of.facts["updates"] * of.facts["steps_per_update"]
    alone = [np.median(turn.seconds) for turn in of.turns["sequential"]]
    walls = {name: [turn.wall_s for turn in turns] for name, turns in of.turns.items()}
    one_device = max(steps / np.median(walls[name]) for name in ("sequential", "fused") if name in walls)
    made = []
    for name, turns in of.turns.items():
        mode, first = of.modes[name], turns[0]
        rate = steps / np.median(walls[name])
        median = lambda field, turns=turns: float(np.median([getattr(turn, field) for turn in turns]))
        slower = [np.median(turn.seconds) / base for turn, base in zip(turns, alone)]
        host, device = int(median("host_bytes")), int(median("device_bytes"))
        made.append(
            apart
            | dict(
                mode=name,
                devices=mode.devices,
                processes=mode.at_once,
                wall_s=round(float(np.median(walls[name])), 3),
                wall_low_s=round(min(walls[name]), 3),
                wall_high_s=round(max(walls[name]), 3),
                env_steps_per_s=round(rate),
                slowdown=round(float(np.median(slower)), 3),
                peak_bytes=device or host,
                host_bytes=host,
                efficiency=round(rate / (one_device * mode.devices), 3),
                utilisation=None if first.utilisation is None else round(median("utilisation"), 3),
                cpu_s=round(median("cpu_s"), 3),
                **_returned(first),
                alive=first.alive,
                rounds=len(turns),
            )
        )
    return made


def _returned(turn: Turn) -> Row:
    """The mean of the agents' evaluations, by the policy as it acts in training, and its 95 % interval."""
    returns = np.asarray(turn.returns)
    sure = np.isfinite(returns).all()
    interval = statistics.bootstrap_interval(returns, statistics.mean) if sure else None
    return dict(
        return_mean=round(float(returns.mean()), 3),
        return_ci=interval and [round(x, 3) for x in interval],
    )


def agreement(of: Compared) -> Row:
    """How far parameters after the same first updates are from those of agents that ran alone.

    The largest |x - y| / max(1, |y|) over all agents and parameters, with where it is. Not for longer:
    training amplifies the last bit, which placement changes.
    """
    reference = of.turns["sequential"][0].params
    worst: Row = dict(largest=0.0, mode=None, agent=None)
    modes = {}
    for name, turns in of.turns.items():
        away = np.max(np.abs(turns[0].params - reference) / np.maximum(1, np.abs(reference)), 1)
        modes[name] = float(np.max(away))
        if not modes[name] <= worst["largest"]:  # also where it is NaN
            worst = dict(largest=modes[name], mode=name, agent=int(np.argmax(away)))
    updates = min(COMPARED_UPDATES, of.facts["updates"])
    holds = all(away <= TOLERANCE for away in modes.values())
    return dict(updates=updates, tolerance=TOLERANCE, **worst, holds=holds, modes=modes)


def disagreement(check: Row) -> str:
    """What is wrong where modes do not agree."""
    return (
        f"{check['mode']} and sequential do not train alike: after {check['updates']} updates agent "
        f"{check['agent']}'s parameters are {check['largest']:.2g} apart, more than {check['tolerance']:g}"
    )


def recommendation(made: Sequence[Row], agents: int) -> str:
    """How to run them, in one sentence and its reason, from the rows alone."""
    fastest = max(made, key=lambda row: row["env_steps_per_s"])
    near = [row for row in made if row["env_steps_per_s"] * AS_FAST >= fastest["env_steps_per_s"]]
    best = min(near, key=lambda row: row["peak_bytes"])
    times = lambda row: f"{best['env_steps_per_s'] / row['env_steps_per_s']:.2f} times"
    others = sorted((r for r in made if r is not best), key=lambda r: -r["env_steps_per_s"])
    words = [
        f"Run {agents} agents {_words(best)}: "
        f"{text.count(best['env_steps_per_s'])} env steps/s, "
        + ", ".join(f"{times(row)} {row['mode']}{_apart(row)}" for row in others)
    ]
    if best is not fastest:
        words[0] += f"; as fast as {fastest['mode']} but for noise, in less memory"
    if best["utilisation"] is not None and others[0]["utilisation"] is not None:
        busy = lambda row: (
            f"{row['utilisation']:.0%} busy and takes {text.duration(row['cpu_s'])} of CPU time"
        )
        words.append(f"It keeps the devices {busy(best)}; {others[0]['mode']} {busy(others[0])}")
    leanest = min(made, key=lambda row: row["peak_bytes"])
    most = max(made, key=lambda row: row["peak_bytes"])
    memory = f"It takes {text.size(best['peak_bytes'])} of memory"
    if most is not best:
        memory += f", {most['mode']} {text.size(most['peak_bytes'])}"
    if leanest["peak_bytes"] < 0.8 * best["peak_bytes"]:
        memory += f"; if that is too much, {leanest['mode']} takes {text.size(leanest['peak_bytes'])}"
    return ". ".join([*words, memory]) + "."


def _words(row: Row) -> str:
    return WORDS[row["mode"]].format(devices=row["devices"]) + _apart(row)


def _apart(row: Row) -> str:
    """The crossed settings of a row, which stand before its mode."""
    names = list(row)[: list(row).index("mode")]
    return f" ({', '.join(f'{name}={row[name]}' for name in names)})" if names else ""


def shown(made: Sequence[Row]) -> list[Row]:
    """The rows of a table for people."""
    return [
        dict(list(row.items())[: list(row).index("mode")])
        | {
            "mode": row["mode"],
            "devices": row["devices"],
            "processes": row["processes"],
            "wall s": f"{row['wall_s']:.2f}",
            "env steps/s": row["env_steps_per_s"],
            "slowdown": f"{row['slowdown']:.2f}",
            "memory MB": round(row["peak_bytes"] / 1e6),
            "efficiency": f"{row['efficiency']:.2f}",
            "busy": "–" if row["utilisation"] is None else f"{row['utilisation']:.0%}",
            "return": text.score(row["return_mean"]),
            "95 %": " … ".join(map(text.score, row["return_ci"])) if row["return_ci"] else "–",
        }
        for row in made
    ]


def notes(of: Compared) -> list[str]:
    """What must not go unsaid."""
    said = list(of.notes)
    if mps_is_on():
        said.append("processes share GPUs through MPS")
    lost = [name for name, turns in of.turns.items() if turns[0].alive < of.settings.train.agents]
    if lost:
        said.append(f"agents diverged and were frozen in {', '.join(lost)}")
    return said


def draw(made: Sequence[Row], path: Path) -> None:
    """A picture of the rows as an SVG file: rate, slow-down of an agent, memory."""
    labels = [f"{row['mode']}{_apart(row)}" for row in made]
    columns = [
        ("env steps/s, thousands", [row["env_steps_per_s"] / 1e3 for row in made]),
        ("time of one agent, × alone", [row["slowdown"] for row in made]),
        ("peak memory, MB", [row["peak_bytes"] / 1e6 for row in made]),
    ]

    def bars(*plots: Any) -> None:
        for axes, (title, values) in zip(plots, columns):
            drawn = axes.barh(range(len(values)), values, color=ACCENT, height=0.62)
            axes.bar_label(
                drawn, [f"{x:.3g}" if x < 100 else f"{x:,.0f}" for x in values], padding=3, fontsize=9
            )
            axes.set_yticks(range(len(values)), labels if axes is plots[0] else [""] * len(values))
            axes.set_xlim(0, 1.25 * max(values))
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set_xlabel(title)

    height = 1.0 + 0.34 * len(made)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, standing_alone(figure("modes", bars, height, len(columns), counts=False)))
