"""The verbs about runs that exist, from their files alone: runs, runs rm, show, compare, report."""

import contextlib
import operator
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shoal.app import text
from shoal.app.config import VARIES, convert, nearest, read_recorded, show_value
from shoal.errors import ShoalError
from shoal.runs import folder, manifest, statistics
from shoal.runs.folder import RunFolder
from shoal.runs.metrics import last_rows

TESTS = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def runs(
    where: str | None = None,  # only some, e.g. 'return>400 and algo=ppo'
    root: str = "runs",  # the folder of run folders
    json: bool = False,  # as JSON
) -> None:
    """List and filter runs, newest first; --where takes any column of the table."""
    rows = [row for row, _ in _rows(root, where)]
    if json:
        print(text.json_line(rows))
    elif rows:
        print(text.table([_shown(row) for row in rows]))
    else:
        print(f"no runs{' like that' if where else ''} in {root}", file=sys.stderr)


def remove(
    run: str | None = None,  # a name under --root, a path, or `last`
    /,
    where: str | None = None,  # instead of RUN: all that fit, e.g. 'return<100'
    yes: bool = False,  # do not ask
    root: str = "runs",  # the folder of run folders
) -> None:
    """Remove runs with everything in their folders, after asking."""
    if (run is None) == (where is None):
        raise ShoalError("shoal runs rm needs RUN or --where, and not both", "shoal runs lists the runs")
    found = [run for _, run in _rows(root, where)] if run is None else [folder.open_run(run, root)]
    for one in found:
        if folder.status(one) == "live":
            raise ShoalError(f"{one.path} is training just now", "stop it first (Ctrl-C, or kill -TERM)")
    sizes = [folder.size_bytes(one.path) for one in found]
    for one, size in zip(found, sizes):
        print(f"{one.path}  {text.size(size)}", file=sys.stderr)
    if not found:
        print("nothing to remove", file=sys.stderr)
    elif yes or _confirmed(f"remove {len(found)} run(s), {text.size(sum(sizes))}?"):
        for one in found:
            shutil.rmtree(one.path)
        print(f"removed {len(found)} run(s), {text.size(sum(sizes))}")


def show(
    run: str = "last",  # a name under --root, a path, or `last`
    /,
    root: str = "runs",  # the folder of run folders
    json: bool = False,  # as JSON
) -> None:
    """Show a run's result, and each setting with its origin."""
    found = folder.open_run(run, root)
    facts = manifest.read_object(found.manifest)
    tables, origins = read_recorded(found.config)
    settings = {
        key if table == "train" else f"{table}.{key}": value
        for table, values in tables.items()
        for key, value in values.items()
    }
    if json:
        print(text.json_line({"manifest": facts, "settings": settings, "origins": origins}))
        return
    row = _row(found)
    print(f"{found.path}: {row['status']}, {text.size(row['bytes'])}")
    if result := facts.get("result"):
        from shoal.app.training import summary

        with manifest.reading(found.manifest):
            print(summary(result))
    for name in (
        "started",
        "command",
        "git",
        "device_kind",
        "devices",
        "precision",
        "fingerprint",
        "packages",
    ):
        if facts.get(name):
            print(f"{name}: {_flat(facts[name])}")
    for note in facts.get("notes") or ():
        print(f"note: {note}")
    print()
    swept = {
        name.strip(): values.strip()
        for name, _, values in (x.partition("=") for x in settings.get("sweep", ()))
    }
    swept |= facts.get("varied") or {}
    settings, origins = settings | swept, origins | dict.fromkeys(swept, VARIES)
    rows = [dict(setting=k, value=show_value(v), origin=origins.get(k, "")) for k, v in settings.items()]
    print(text.table(rows))


def compare(
    a: str,  # a run: a name under --root, a path, or `last`
    b: str,  # another
    /,
    root: str = "runs",  # the folder of run folders
    json: bool = False,  # as JSON
) -> None:
    """Compare the returns of two runs: IQM with its interval, and how likely A is better than B."""
    found = [folder.open_run(spec, root) for spec in (a, b)]
    envs = [_row(run)["env"] for run in found]
    if envs[0] != envs[1]:
        raise ShoalError(
            f"{found[0].name} is {envs[0]}, {found[1].name} is {envs[1]}", "compare runs of one env"
        )
    x, y = (_returns(run) for run in found)
    rows = [_compared(run, values) for run, values in zip(found, (x, y))]
    better = interval = None
    lost = [
        f"{np.isnan(values).sum()} of {len(values)} agents of {run.name} have no return"
        for run, values in zip(found, (x, y))
        if np.isnan(values).any()
    ]
    if min(len(x), len(y)) > 1 and not lost:
        better = statistics.probability_of_improvement(x, y)
        interval = statistics.bootstrap_interval((x, y), statistics.probability_of_improvement)
    if json:
        facts = {"runs": rows, "probability_of_improvement": better, "probability_interval": interval}
        print(text.json_line(facts))
        return
    words = dict(mean=text.score, iqm=text.score, interval=_interval)
    print(
        text.table([row | {name: show(row[name]) for name, show in words.items()} for row in rows]),
        end="\n\n",
    )
    if lost:
        print(f"no interval and no probability: {'; '.join(lost)}")
    elif interval is None:
        print("one agent gives no interval and no probability: train with --agents 8 or more")
    else:
        low, high = interval
        print(
            f"an agent of {found[0].name} scores higher than one of {found[1].name} with probability "
            f"{better:.2f} (95 % {low:.2f} … {high:.2f})"
        )


def report(
    run: str = "last",  # a name under --root, a path, or `last`
    /,
    root: str = "runs",  # the folder of run folders
) -> None:
    """Write a run's report.html again."""
    from shoal.runs.report import write_report

    found = folder.open_run(run, root)
    write_report(found)
    print(found.report)


# --- Rows -------------------------------------------------------------------------------------


def _rows(root: str, where: str | None) -> list[tuple[dict[str, Any], RunFolder]]:
    tests = list(_tests(where))
    rows = [(_row(run), run) for run in folder.list_runs(root)]
    return [(row, run) for row, run in rows if all(test(row) for test in tests)]


def _row(run: RunFolder) -> dict[str, Any]:
    """One run as the table has it; steps are per agent. What cannot be read is blank, the run `damaged`."""
    row: dict[str, Any] = dict(name=run.name, env="?", algo="?", agents=0, status="damaged", steps=0)
    row |= {"return": None, "bytes": folder.size_bytes(run.path), "started": ""}
    with contextlib.suppress(ShoalError):
        facts = manifest.read_object(run.manifest, "env", "algo", "agents", "started")
        row |= {name: str(facts[name]) for name in ("env", "algo", "started")}
        with manifest.reading(run.manifest):
            row["agents"] = int(facts["agents"])
            result = facts.get("result") or {}
            reached = result.get("return_mean")
            row["return"] = None if reached is None else float(reached)
            row["steps"] = int(result.get("env_steps_per_agent") or 0)  # a sweep over shapes has no rows
        manifest.read_toml(run.config)
        last = last_rows(run.metrics)
        with manifest.reading(run.metrics):
            if last:
                row["steps"] = int(last[-1]["env_steps"])
            returns = np.array([agent.get("return_mean") for agent in last], float)
            if not result and np.isfinite(returns).any():
                row["return"] = float(np.nanmean(returns))
        row["status"] = folder.status(run)
    return row


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(steps=text.count(row["steps"]), bytes=text.size(row["bytes"]))
    return {**row, **changed, "return": text.score(row["return"]), "started": row["started"][:16]}


def _tests(where: str | None) -> Iterable[Any]:
    """Each condition of `return>400 and algo=ppo` as a function of a row."""
    known = ("name", "env", "algo", "agents", "status", "steps", "return", "bytes", "started")
    for part in re.split(r"\s+and\s+", where) if where else ():
        match = re.fullmatch(r"\s*(\w+)\s*(>=|<=|!=|=|>|<)\s*(.+?)\s*", part)
        if not match:
            raise ShoalError(f"--where cannot read {part!r}", "write it like return>400 and algo=ppo")
        name, sign, wanted = match.groups()
        if name not in known:
            raise ShoalError(
                f"--where: runs have no {name}", f"{nearest(name, known)} {', '.join(known)}".strip()
            )
        yield lambda row, name=name, sign=sign, wanted=wanted: _holds(row[name], sign, wanted)


def _holds(value: Any, sign: str, wanted: str) -> bool:
    if value is None:
        return False
    return TESTS[sign](value, convert("--where", wanted, type(value)))


def _compared(run: RunFolder, returns: np.ndarray) -> dict[str, Any]:
    sure = len(returns) > 1 and not np.isnan(returns).any()
    interval = statistics.bootstrap_interval(returns) if sure else None
    return dict(
        run=run.name,
        agents=len(returns),
        mean=statistics.mean(returns),
        iqm=statistics.iqm(returns),
        interval=interval,
    )


def _returns(run: RunFolder) -> np.ndarray:
    """Each agent's final return, NaN for none."""
    result = manifest.read_object(run.manifest).get("result")
    if not result:
        raise ShoalError(f"{run.path} has no result yet", f"shoal resume {run.path}")
    with manifest.reading(run.manifest):
        returns = np.array(result["returns"], float)
        if returns.ndim != 1 or not returns.size:
            raise ValueError(f"returns should be a list of numbers: {result['returns']!r:.60}")
    return returns


def _interval(ends: Any) -> str:
    return "–" if ends is None else f"{ends[0]:.1f} … {ends[1]:.1f}"


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ShoalError(f"{question} There is no terminal to ask on", "say so with --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
