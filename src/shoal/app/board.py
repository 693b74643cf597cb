"""What a run looks like while it runs: a live board on a terminal, plain lines elsewhere, nothing if quiet.

Events are only noted when they arrive. A terminal is redrawn four times a second by a thread of its own,
so that the seconds of a compile count up while the program is busy. All of it goes to stderr.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.app.text import count, duration, score, size, sparkline
from shoal.training import events

REDRAWS_PER_S = 4
SECONDS_BETWEEN_LINES = 5.0
BAR = 30


@contextlib.contextmanager
def board(quiet: bool = False) -> Iterator["Board"]:
    """A listener for `train`, shown in the way that fits where stderr goes."""
    quiet = quiet or sys.stderr is None
    listener = Board(lines=not quiet and not sys.stderr.isatty())
    if quiet or listener.prints:
        yield listener
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    with Live(console=console, get_renderable=listener.drawn, refresh_per_second=REDRAWS_PER_S):
        yield listener


class Board:
    """What has happened so far in a run, and how it looks."""

    def __init__(self, lines: bool = False):
        self.prints = lines  # a plain line now and then, as events come
        self.plan: events.Planned | None = None
        self.progress: events.Progress | None = None
        self.medians: list[float] = []  # of the return over agents, one per chunk
        self.compiled: dict[str, float] = {}  # program → seconds
        self.compiling: tuple[str, float] | None = None  # program, since when
        self.news: list[str] = []  # what happened once: evaluations, divergence, stopping
        self._line_due = 0.0

    def __call__(self, event: events.Event) -> None:
        """Note an event; a plain line is printed when one is due."""
        if isinstance(event, events.Saved):  # for the log
            return
        due = True
        if isinstance(event, events.Progress):
            self.progress = event
            self.medians.append(_band(event.returns)[1])
            due = time.monotonic() >= self._line_due or event.updates == event.total_updates
        elif isinstance(event, events.Planned):
            self.plan = event
        elif isinstance(event, events.Compiling):
            self.compiling = event.program, time.monotonic()
        elif isinstance(event, events.Compiled):
            self.compiling = None
            self.compiled[event.program] = self.compiled.get(event.program, 0.0) + event.seconds
        elif news := describe(event):
            self.news.append(news)
        if due and self.prints:
            self._print(event)

    def lines(self) -> list[str]:
        """The whole board as it stands."""
        lines = plan_lines(self.plan) if self.plan else []
        if self.compiled or self.compiling:
            parts = [f"{program} {duration(seconds)}" for program, seconds in self.compiled.items()]
            if self.compiling:
                program, since = self.compiling
                parts.append(f"{program} {duration(time.monotonic() - since)} …")
            lines.append(f"compile  {'   '.join(parts)}")
        if self.progress:
            lines += progress_lines(self.progress)
            lines.append(f"         {sparkline(self.medians)}")
        return lines + self.news[-5:]

    def drawn(self) -> Any:
        """For rich."""
        from rich.text import Text

        return Text("\n".join(self.lines()))

    def _print(self, event: events.Event) -> None:
        if isinstance(event, events.Planned):
            lines = plan_lines(event)
        elif isinstance(event, events.Compiling):
            lines = [f"compiling {event.program} …"]
        elif isinstance(event, events.Progress):
            lines = [" ".join(" ".join(progress_lines(event, bar=0)).split())]
            self._line_due = time.monotonic() + SECONDS_BETWEEN_LINES
        else:
            lines = [news] if (news := describe(event)) else []
        try:
            for line in lines:
                print(line, file=sys.stderr, flush=True)
        except (OSError, ValueError):  # a closed pipe or a full disk behind stderr may not end a training
            self.prints = False


def plan_lines(plan: events.Planned) -> list[str]:
    """What will run, before it does; one more line for each fact that must not go unsaid."""
    rounded = "" if plan.steps == plan.steps_asked else f" (asked: {plan.steps_asked:,})"
    memory = f", about {size(plan.bytes_predicted)}" if plan.bytes_predicted else ""
    devices = f"{plan.devices} {plan.device_kind} device{'s' * (plan.devices != 1)}"
    first = (
        f"{plan.env} {plan.algo}: {plan.agents} agents × {plan.envs} envs on {devices}; "
        f"{plan.steps:,} steps each{rounded} in {plan.updates:,} updates{memory}"
    )
    return [first, *(f"note: {note}" for note in plan.notes)]


def progress_lines(now: events.Progress, bar: int = BAR) -> list[str]:
    share = now.updates / max(now.total_updates, 1)
    full = round(bar * share)
    low, median, high = map(score, _band(now.returns))
    return [
        f"{'━' * full}{'╌' * (bar - full)}  {share:4.0%}  {count(now.env_steps)} steps each  "
        f"{count(now.env_steps_per_s)} steps/s  {duration(now.eta_s)} left",
        f"return   min {low}  median {median}  max {high}   alive {int(now.active.sum())}/{len(now.active)}",
    ]


def describe(event: events.Event) -> str:
    """One line about an event that happens now and then; nothing for the others."""
    if isinstance(event, events.Evaluated):
        low, median, high = map(score, _band(event.returns))
        return f"evaluated at {count(event.env_steps)} steps: min {low}  median {median}  max {high}"
    if isinstance(event, events.Diverged):
        return f"agent {event.agent} diverged in update {event.updates} and is frozen as it was before"
    if isinstance(event, events.Selected):
        return f"update {event.updates:,}: {event.replaced} of {event.agents} replaced by {event.by}"
    if isinstance(event, events.Compiled):
        return f"compiled {event.program} in {duration(event.seconds)}"
    if isinstance(event, events.Saved):
        return f"saved at update {event.updates:,}"
    if isinstance(event, events.Stopping):
        return f"stopping: {event.reason}"
    return event.text if isinstance(event, events.Note) else ""


def _band(returns: np.ndarray) -> tuple[float, float, float]:
    """Lowest, median and highest; NaN where no agent has finished an episode."""
    finite = returns[np.isfinite(returns)]
    if not finite.size:
        return (float("nan"),) * 3
    return float(finite.min()), float(np.median(finite)), float(finite.max())
