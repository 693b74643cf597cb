"""The verbs that compute: train, resume, eval, play, export. What they do is in other modules."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.app import text
from shoal.app.board import Board, board
from shoal.app.config import OutputConfig
from shoal.runs.folder import PARTS, open_run, parts


def train(words: Sequence[str]) -> int:
    """Train many agents on one env, in one program."""
    from shoal.app.commandline import read_train

    settings, output = read_train(words)
    from shoal.app import programs

    return _show_training(output, lambda listen: programs.train(settings, output, listen))


def resume(
    run: str = "last",  # a name under --root, a path, or `last`
    /,
    steps: int | None = None,  # per agent in total, to train longer than was asked for
    device: str | None = None,  # auto, cpu, gpu or tpu; none = as before
    devices: int | None = None,  # how many, 0 = all; none = as before
    mesh: str | None = None,  # devices per axis, agent=2,data=2, or auto; none = as before
    root: str = "runs",  # the folder of run folders
    report: bool = True,  # write report.html and a video at the end
    quiet: bool = False,  # show errors only
    profile: bool = False,  # write a trace and a time split
    json: bool = False,  # end stdout with one line of JSON
) -> int:
    """Continue a run where it stopped, or for longer."""
    path = open_run(run, root).path
    from shoal.app import programs

    given = {"steps": steps, "device": device, "devices": devices, "mesh": mesh}
    changes = {name: value for name, value in given.items() if value is not None}
    output = OutputConfig(root=root, report=report, quiet=quiet, profile=profile, json=json)
    return _show_training(output, lambda listen: programs.resume(path, changes, output, listen))


def evaluate(
    run: str = "last",  # a name under --root, a path, or `last`
    /,
    episodes: int | None = None,  # per agent; none = as in training
    seed: int = 0,  # of the episodes; 0 = those that training ended with and the best agent was chosen by
    root: str = "runs",  # the folder of run folders
    quiet: bool = False,  # show errors only
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Score a run's agents again: on the same episodes, or others; nothing in its folder changes."""
    path = open_run(run, root).path
    from shoal.app import afterwards

    with board(quiet) as listen:
        row = afterwards.evaluate(path, episodes, seed, listen=listen)
    print(text.json_line(row) if json else f"{row['run']}: {_returns(row)}")


def play(
    run: str = "last",  # a name under --root, a path, or `last`
    /,
    agent: str = "best",  # best, median, worst or an agent's number
    root: str = "runs",  # the folder of run folders
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Make a video of an agent."""
    path = open_run(run, root).path
    from shoal.app import afterwards

    made = afterwards.play(path, int(agent) if agent.isdecimal() else agent)
    print(text.json_line({"video": made}) if json else made)


def export(
    run: str = "last",  # a name under --root, a path, or `last`
    /,
    out: str | None = None,  # the new folder; none = RUN-policy here
    root: str = "runs",  # the folder of run folders
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Copy the trained policies for use elsewhere: safetensors and a JSON contract."""
    folder = open_run(run, root)
    from shoal.app import afterwards

    made = afterwards.export(folder.path, Path(out or f"{folder.name.replace('/', '-')}-policy"))
    if parts(folder):
        hint = f"for another: shoal export {folder.path / PARTS}/N"
        print(f"exported the program with the best agent; {hint}", file=sys.stderr)
    print(text.json_line({"policy": made}) if json else made)


# --- What is printed --------------------------------------------------------------------------


def _show_training(output: OutputConfig, run: Callable[[Board], Any]) -> int:
    """Train under a board; then the result on stdout: a few lines for people, or one of JSON.

    Returns the exit code: 1 where every agent has diverged.
    """
    with board(output.quiet) as listen:
        done = run(listen)
    if done is None:  # a dry run, or a signal before there was a run
        if output.json:
            plan = listen.plan._asdict() if listen.plan else {}
            print(text.json_line({"run": None, "stopped": not output.dry_run, "plan": plan}))
        return 0
    result = (
        done.result if done.finished else {"run": done.path.name, "path": str(done.path), "stopped": True}
    )
    if output.json:
        print(text.json_line(result))
    elif output.quiet:
        pass
    elif done.finished:
        print(summary(result))
    else:
        print(f"stopped; go on with: shoal resume {done.path}")
    return 0 if result.get("alive", 1) else 1


def summary(result: Mapping[str, Any]) -> str:
    """A finished run in three lines."""
    steps, rate = text.count(result["env_steps"], " "), text.count(result["env_steps_per_s"])
    took, compiling, total = (text.duration(result[name]) for name in ("wall_s", "compile_s", "total_s"))
    lines = [
        _returns(result),
        f"{steps} env steps in {took} (compiling {compiling}; then {rate} steps/s); {total} with all else",
        f"all of it is in {result['path']}",
    ]
    if varied := result.get("varied"):
        best = result["agent_ids"].index(result["best_agent"])
        value = lambda x: x if isinstance(x, str) else f"{x:.3g}"
        values = ", ".join(f"{name} {value(column[best])}" for name, column in varied.items())
        lines.insert(
            1, f"best: agent {result['best_agent']}, {text.score(result['returns'][best])}, with {values}"
        )
    if lost := result["diverged"]:
        named = ", ".join(map(str, lost[:8])) + (" …" if len(lost) > 8 else "")
        lines.insert(
            1,
            f"{len(lost)} of {result['agents']} agents diverged and were frozen: {named} "
            f"(is the env sound? shoal env check {result['env']})",
        )
    return "\n".join(lines)


def _returns(row: Mapping[str, Any]) -> str:
    ends = row.get("return_ci")
    interval = f" (95 % {text.score(ends[0])} … {text.score(ends[1])})" if ends else ""
    return (
        f"return {text.score(row['return_mean'])}{interval}, IQM {text.score(row['return_iqm'])}, "
        f"greedy {text.score(row['return_greedy'])}"
    )
