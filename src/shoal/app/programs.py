"""Train or resume a run, of one program or of several: a sweep over shapes needs one program for each.

runs/cartpole-ppo-k3f9/   manifest.json config.toml report.html   programs/0/ programs/1/ …   each a whole run
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.app import session, sweep
from shoal.app.assembly import assemble
from shoal.app.config import VARIES, OutputConfig, Settings, reopen, to_toml_tables
from shoal.app.run import Run
from shoal.app.warmstart import Preparation
from shoal.runs import checkpoints, folder, manifest
from shoal.runs.folder import PARTS, RunFolder
from shoal.training import events, loop


def train(
    settings: Settings,
    output: OutputConfig = OutputConfig(),  # noqa: B008
    listen: loop.Listener = lambda event: None,
    hook: loop.Hook | None = None,
) -> Run | None:
    """Train a population from the start into a new run folder: see `session.train`.

    Where the sweep needs several programs, they run one after the other, each into a folder of its own.
    """
    parts = sweep.programs(settings)
    if len(parts) == 1:
        return session.train(parts[0].settings, output, listen, hook)
    listen(_announced(parts))
    if output.dry_run:
        for part in parts:
            session.train(part.settings, output, listen)
        return None
    for part in parts:
        Preparation(
            assemble(part.settings), output.root
        )  # refuses what cannot be made, before anything trains
    run = folder.create(output.root, settings.train.env, settings.train.algo, output.out)
    with folder.lock(run):
        _write_config(run, settings)
        manifest.write_json(run.manifest, _facts(settings))
        return _train_parts(settings, run, {}, output, listen, hook)


def resume(
    path: str | Path,
    changes: Mapping[str, Any] | None = None,
    output: OutputConfig = OutputConfig(),  # noqa: B008
    listen: loop.Listener = lambda event: None,
    hook: loop.Hook | None = None,
) -> Run:
    """Go on from a run's newest checkpoint: see `session.resume`. Parts that have not begun are begun."""
    run = folder.open_run(path, output.root)
    if PARTS not in manifest.read_object(run.manifest):
        return session.resume(path, changes, output, listen, hook)
    changes = session.lifted(changes)
    settings = reopen(run.config, changes)
    with folder.lock(run):
        _refuse_fewer(settings, run)
        _write_config(run, settings)
        listen(_announced(sweep.programs(settings)))
        return _train_parts(settings, run, changes, output, listen, hook)


def _write_config(run: RunFolder, settings: Settings) -> None:
    swept = dict.fromkeys(map(sweep.name_of, settings.train.sweep), VARIES)
    marked = replace(settings, origins=settings.origins | swept)
    manifest.write_toml(run.config, *to_toml_tables(marked))


def _refuse_fewer(settings: Settings, run: RunFolder) -> None:
    """ShoalError where a part cannot go on with the steps asked for now; nothing is changed before."""
    for place in sorted((run.path / PARTS).glob("*/manifest.json")):
        part, facts = RunFolder(place.parent), manifest.read_object(place, "steps", "updates")
        each = facts["steps"] // facts["updates"]
        done = max(checkpoints.steps(part.checkpoints), default=0)
        if done > -(-settings.train.steps // each):
            raise session.has_more(part, done * each, settings.train.steps)


def _announced(parts: list[sweep.Program]) -> events.Note:
    each = ", ".join(f"{part.label} ({part.settings.train.agents} agents)" for part in parts)
    return events.Note(f"{len(parts)} programs to compile, one after the other: {each}")


def _train_parts(
    settings: Settings,
    run: RunFolder,
    changes: Mapping[str, Any],
    output: OutputConfig,
    listen: loop.Listener,
    hook: loop.Hook | None,
) -> Run:
    """Begin or go on with each part; stops with the first that is stopped."""
    parts, done = sweep.programs(settings), []
    for number, part in enumerate(parts):
        place = run.path / PARTS / str(number)
        inside = replace(output, out=str(place), root=str(place.parent))
        listen(events.Note(f"program {number + 1} of {len(parts)}: {part.label}"))
        if (place / "manifest.json").is_file():
            one: Run | None = session.resume(place, changes, replace(inside, out=None), listen, hook)
        else:
            if place.exists() and not checkpoints.steps(RunFolder(place).checkpoints):
                shutil.rmtree(place)  # of a part that was killed while it began
            one = session.train(part.settings, inside, listen, hook)
        if one is None or not one.finished:
            return Run.of(run)
        done.append((part, one.result))
    known = manifest.read_object(run.manifest)
    manifest.write_json(run.manifest, known | dict(finished=True, result=_result(run, settings, done)))
    if output.report:
        from shoal.runs.report import write_report

        write_report(run)
    return Run.of(run)


def _facts(settings: Settings) -> dict[str, Any]:
    train = settings.train
    named = dict(env=train.env, algo=train.algo, agents=train.agents, seed=train.seed)
    named |= dict(pbt=train.pbt, halving=train.halving)
    return (
        manifest.collect()
        | named
        | {"finished": False, PARTS: [part.shape for part in sweep.programs(settings)]}
    )


def _result(run: RunFolder, settings: Settings, done: list[tuple[sweep.Program, dict]]) -> dict[str, Any]:
    """The parts' results together; agents in the order of the parts, named program/agent."""
    results = [result for _, result in done]
    every: Callable[[str], np.ndarray] = lambda name: np.array([result[name] for result in results])
    returns = np.concatenate([result["returns"] for result in results])
    agents, steps = every("agents"), float(every("env_steps").sum())
    named = lambda which: [f"{i}/{agent}" for i, result in enumerate(results) for agent in result[which]]
    best = int(np.argmax([np.nanmax(result["returns"], initial=-np.inf) for result in results]))
    columns = dict(return_mean=returns, return_greedy=np.repeat(every("return_greedy"), agents))
    training_s = (every("wall_s") - every("compile_s")).sum()
    summed = {name: round(float(every(name).sum()), 3) for name in ("wall_s", "compile_s", "total_s")}
    kept = ("run", "agents", "return_mean", "return_iqm", "return_ci", "env_steps_per_s", "alive")
    return dict(
        run=run.name,
        path=str(run.path),
        env=settings.train.env,
        algo=settings.train.algo,
        agents=int(agents.sum()),
        env_steps=int(steps),
        env_steps_per_agent=int(every("env_steps_per_agent").max()),
        **summed,
        env_steps_per_s=round(steps / max(training_s, 1e-9), 1),
        **session.scores_of(columns),
        alive=int(every("alive").sum()),
        agent_ids=named("agent_ids"),
        best_agent=f"{best}/{results[best]['best_agent']}",
        varied=_varied(done),
        diverged=named("diverged"),
        programs=[{"program": part.label, **{name: one[name] for name in kept}} for part, one in done],
    )


def _varied(done: list[tuple[sweep.Program, dict]]) -> dict[str, list]:
    """What differs between agents, one value for each: knobs as numbers, shapes as they were written."""
    shapes = {
        name: [part.shape[name] for part, result in done for _ in result["returns"]]
        for name in done[0][0].shape
    }
    knobs = {name: [x for _, result in done for x in result["varied"][name]] for name in done[0][1]["varied"]}
    return shapes | knobs
