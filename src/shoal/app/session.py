"""Train a population into a run folder, and go on from one."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.algos.update import AgentState
from shoal.app import policies, video
from shoal.app.assembly import Assembled, Compiler, assemble, facts, planned
from shoal.app.board import describe
from shoal.app.config import OutputConfig, Settings, reopen, to_toml_tables
from shoal.app.run import Run
from shoal.errors import ShoalError
from shoal.population.lanes import identities, resize, stacked
from shoal.runs import checkpoints, folder, manifest, statistics
from shoal.runs.folder import RunFolder
from shoal.runs.metrics import RowWriter, truncate_after
from shoal.training import events, loop, program

_log = logging.getLogger("shoal")


def train(
    settings: Settings,
    output: OutputConfig = OutputConfig(),  # noqa: B008
    listen: loop.Listener = lambda event: None,
    hook: loop.Hook | None = None,
) -> Run | None:
    """Train a population from the start into a new run folder; None after a dry run."""
    began = time.perf_counter()
    made, compiler = assemble(settings), Compiler(listen)
    chunk, size = compiler("training", lambda: program.compile_chunk(made.recipe, made.layout))
    listen(planned(made, size))
    if output.dry_run:
        return None
    run = folder.create(output.root, settings.train.env, settings.train.algo, output.out)
    with folder.lock(run):
        manifest.write_toml(run.config, *to_toml_tables(settings))
        manifest.write_json(run.manifest, facts(made))
        state = fresh_state(made, compiler)()
        return _Training(made, compiler, run, output, began).run(chunk, state, loop.Tally(), listen, hook)


def resume(
    path: str | Path,
    changes: Mapping[str, Any] | None = None,
    output: OutputConfig = OutputConfig(),  # noqa: B008
    listen: loop.Listener = lambda event: None,
    hook: loop.Hook | None = None,
) -> Run:
    """Go on from a run's newest checkpoint, bit for bit on the same devices.

    `changes` to its settings: more `steps` per agent in total, another `device` or number of `devices`.
    """
    began = time.perf_counter()
    run = folder.open_run(path, output.root)
    settings = reopen(run.config, changes)
    with folder.lock(run):
        before = manifest.read_json(run.manifest)
        if before.get("finished") and "steps" not in (changes or {}):
            _log.warning("%s has finished already; --steps N trains it longer", run.path)
            return Run(run.path)
        made, compiler = assemble(settings), Compiler(listen)
        _refuse_fewer(made, run, max(checkpoints.steps(run.checkpoints), default=0))
        chunk, size = compiler("training", lambda: program.compile_chunk(made.recipe, made.layout))
        if checkpoints.steps(run.checkpoints):
            state, tally, notes = restored(made, run)
        else:
            state, tally = fresh_state(made, compiler)(), loop.Tally()
            notes = ("no checkpoint was written yet: starting from the beginning",)
        listen(planned(made, size, notes))
        manifest.write_toml(run.config, *to_toml_tables(settings))
        now = facts(made)
        again = [*before.get("resumed", []), {"updates": tally.updates, **now}]
        budget = {name: now[name] for name in ("finished", "steps", "steps_asked")}
        manifest.write_json(run.manifest, before | budget | {"resumed": again})
        for rows in (run.metrics, run.eval):
            if rows.exists():
                truncate_after(rows, tally.updates)
        return _Training(made, compiler, run, output, began).run(chunk, state, tally, listen, hook)


def fresh_state(made: Assembled, compiler: Compiler) -> Callable[[], AgentState]:
    """Compile what makes a population's first state."""
    lanes = made.layout.lanes
    init = compiler("start", lambda: program.compile_init(made.recipe, made.layout))
    return lambda: init(
        identities(made.settings.train.seed, made.plan.agents, made.plan.updates, lanes),
        stacked(made.knobs, lanes),
        stacked(made.env_params, lanes),
    )


def restored(made: Assembled, run: RunFolder) -> tuple[AgentState, loop.Tally, tuple[str, ...]]:
    """State and tally of the newest checkpoint, laid over this run's devices, and what is worth a note."""
    agents, budget = made.plan.agents, made.plan.updates
    full = program.abstract_state(made.recipe, made.layout)
    like = full
    if made.layout.lanes != agents:  # padding lanes are not saved
        one = jax.sharding.SingleDeviceSharding(made.layout.mesh.devices.flat[0])
        cut = lambda x: jax.ShapeDtypeStruct((agents, *x.shape[1:]), x.dtype, sharding=one)
        like = jax.tree.map(cut, full)
    state, meta = checkpoints.restore(run.checkpoints, like)
    tally = loop.Tally(**meta)
    _refuse_fewer(made, run, tally.updates)
    notes: tuple[str, ...] = ()
    if int(np.max(np.asarray(state.identity.budget))) != budget:
        state = state._replace(identity=state.identity._replace(budget=np.full(agents, budget, np.int32)))
        if made.sizes.anneal:
            left = 1 - tally.updates / budget
            notes = (f"lr is annealed over the new budget: it goes on from {left:.0%} of its start",)
    shardings = jax.tree.map(lambda x: x.sharding, full)
    return jax.device_put(resize(state, made.layout.lanes), shardings), tally, notes


def _refuse_fewer(made: Assembled, run: RunFolder, updates: int) -> None:
    if updates > made.plan.updates:
        done, asked = updates * made.plan.steps_per_update, made.settings.train.steps
        raise ShoalError(
            f"{run.path} already has {done:,} env steps per agent, more than --steps {asked:,}",
            "ask for more steps, or start a new run",
        )


class Store:
    """The loop's store: rows and checkpoints of one run folder."""

    def __init__(self, run: RunFolder, agents: int, keep: int):
        self.agents = agents
        self.metrics, self.eval = RowWriter(run.metrics), RowWriter(run.eval)
        self.saver = checkpoints.Saver(run.checkpoints, keep)

    def rows(self, columns: dict[str, Any]) -> None:
        self.metrics.write(columns)

    def evaluation(self, columns: dict[str, Any]) -> None:
        self.eval.write(columns)

    def save(self, state: AgentState, tally: loop.Tally) -> None:
        if state.identity.active.shape[0] != self.agents:
            state = resize(state, self.agents)
        self.saver.save(tally.updates, state, tally._asdict(), {tally.best_updates})

    def close(self) -> None:
        self.saver.wait()
        self.metrics.close()
        self.eval.close()


class _Training:
    """One stretch of training in a run folder, from a state to the written result."""

    def __init__(
        self, made: Assembled, compiler: Compiler, run: RunFolder, output: OutputConfig, began: float
    ):
        self.made, self.compiler, self.folder, self.output, self.began = made, compiler, run, output, began
        self._evaluation: Any = None

    def evaluate(self, state: AgentState) -> Any:
        """Compiled when first needed."""
        self._evaluation = self._evaluation or self.compiler.evaluation(self.made)
        return self._evaluation(state)

    def run(self, chunk, state: AgentState, tally: loop.Tally, listen: loop.Listener, hook) -> Run:
        made, compile_s = self.made, self.compiler.seconds
        store = Store(self.folder, made.plan.agents, made.settings.train.keep)
        with contextlib.closing(store), _logging_to(self.folder.log, listen) as listen:
            with _traced(self.output.profile, self.folder, hook) as hook:
                state, tally, stop = loop.train(
                    made.plan, chunk, self.evaluate, state, tally, store, listen, hook
                )
            if stop and not stop.complete:
                return Run(self.folder.path)
            started = time.perf_counter()
            columns = loop.evaluation_columns(made.plan, tally, jax.device_get(self.evaluate(state)))
            store.evaluation(columns)
            tally = tally._replace(evaluate_s=tally.evaluate_s + time.perf_counter() - started)
        full, state = state, resize(state, made.plan.agents)
        write_policy(made, self.folder.policy, state, columns)
        result = self._result(state, tally, columns, compile_s, stop.reason if stop else None)
        split = dict(compile=self.compiler.seconds, train=tally.train_s, evaluate=tally.evaluate_s)
        split |= dict(save=tally.save_s, write=tally.write_s)
        if self.output.profile:  # measured apart, so compiling it is not counted
            rollout_s = min(split["train"], self._rollout_seconds(full) * tally.updates)
            split |= {"train": split["train"] - rollout_s, "rollout": rollout_s}
        self._finish(result, split)
        if self.output.report:
            listen(events.Note("drawing the film and the report"))
            _film(made, self.folder, state, columns["return_mean"])
        result["total_s"] = round(time.perf_counter() - self.began, 3)
        split["other"] = round(max(0.0, result["total_s"] - sum(split.values())), 3)
        self._finish(result, split)
        if self.output.report:
            from shoal.runs.report import write_report

            write_report(self.folder)
        return Run(self.folder.path)

    def _result(self, state, tally: loop.Tally, columns, compile_s: float, stopped: str | None):
        plan, train, returns = self.made.plan, self.made.settings.train, columns["return_mean"]
        env_steps = int(np.sum(np.asarray(state.identity.updates))) * plan.steps_per_update
        final = dict(updates=tally.updates, return_mean=float(returns.mean()))
        seen = dict(updates=tally.best_updates, return_mean=tally.best_return)
        return dict(
            run=self.folder.name,
            path=str(self.folder.path),
            env=train.env,
            algo=train.algo,
            agents=plan.agents,
            env_steps=env_steps,  # of all agents together
            env_steps_per_agent=tally.updates * plan.steps_per_update,
            wall_s=round(compile_s + tally.train_s, 3),
            total_s=round(time.perf_counter() - self.began, 3),
            compile_s=round(compile_s, 3),
            env_steps_per_s=round(env_steps / max(tally.train_s, 1e-9), 1),
            return_mean=float(returns.mean()),
            return_iqm=statistics.iqm(returns),
            return_ci=interval(returns),
            return_greedy=float(columns["return_greedy"].mean()),
            alive=int(np.sum(np.asarray(state.identity.active))),
            diverged=np.flatnonzero(~np.asarray(state.identity.active)).tolist(),
            returns=returns.tolist(),
            best_agent=int(np.argmax(returns)),
            best_checkpoint=max(seen, final, key=lambda row: row["return_mean"]),
            stopped_early=stopped,
        )

    def _rollout_seconds(self, state: AgentState) -> float:
        """Per update, without learning."""
        rollouts = Compiler(lambda event: None)(
            "rollout", lambda: program.compile_rollout(self.made.recipe, self.made.layout)
        )
        updates = np.int32(max(1, self.made.plan.updates // loop.CHUNKS))
        jax.block_until_ready(rollouts(state, updates))
        started = time.perf_counter()
        jax.block_until_ready(rollouts(state, updates))
        return (time.perf_counter() - started) / int(updates)

    def _finish(self, result: dict[str, Any], split: dict[str, float]) -> None:
        known = manifest.read_json(self.folder.manifest)
        manifest.write_json(
            self.folder.manifest, known | dict(finished=True, result=result, time_split=split)
        )


def interval(returns: np.ndarray) -> list[float] | None:
    """95 % bootstrap interval of the mean over agents; one agent has none."""
    if len(returns) < 2:
        return None
    return [float(end) for end in statistics.bootstrap_interval(returns, statistics.mean)]


def write_policy(made: Assembled, path: Path, state: AgentState, columns: dict[str, Any]) -> None:
    """The policies of a whole population (leaves led by agents) with the returns of an evaluation."""
    train = made.settings.train
    contract = dict(
        env=train.env,
        env_params=made.settings.env,
        time_limit=made.env.time_limit,
        algo=train.algo,
        net=train.net,
        sizes=dataclasses.asdict(made.sizes),
        agents=np.asarray(state.identity.agent).tolist(),
        returns=columns["return_mean"].tolist(),
        env_steps=int(columns["env_steps"][0]),
        obs_space=made.env.obs_space(made.env_params),
        action_space=made.env.action_space(made.env_params),
        versions=manifest.collect()["packages"],
    )
    policies.write_policy(path, made.agent, state.learner, contract)


def _film(made: Assembled, run: RunFolder, state: AgentState, returns: np.ndarray) -> None:
    """The best, the median and the worst agent side by side."""
    if made.env.render is None:
        return
    names = ("best", "median", "worst") if len(returns) > 2 else ("best",)
    ids = list(range(len(returns)))
    chosen = [policies.choose_agents(list(returns), ids, name)[0] for name in names]
    labels = [f"{name}: agent {i}, return {returns[i]:.4g}" for name, i in zip(names, chosen)]
    learners, env_params = jax.tree.map(
        lambda x: np.asarray(x)[np.asarray(chosen)], (state.learner, state.env_params)
    )
    policy = jax.vmap(made.agent.policy)(learners)
    video.film(run.path / "video", made.agent, made.env, policy, env_params, labels)


@contextlib.contextmanager
def _logging_to(path: Path, listen: loop.Listener) -> Iterator[loop.Listener]:
    """Events and everything that shoal logs also go to the run's log.txt."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)

    def heard(event: events.Event) -> None:
        if line := describe(event):
            record = logging.LogRecord("shoal", logging.INFO, __file__, 0, line, None, None)
            handler.handle(record)
        listen(event)

    try:
        yield heard
    finally:
        _log.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _traced(wanted: bool, run: RunFolder, hook: loop.Hook | None) -> Iterator[loop.Hook | None]:
    """A profiler trace of the second chunk in the folder `profile/`, for XProf or TensorBoard."""
    if not wanted:
        yield hook
        return
    chunks = 0

    def traced(progress: events.Progress, state: AgentState) -> AgentState | None:
        nonlocal chunks
        chunks += 1
        if chunks == 1:
            jax.profiler.start_trace(str(run.path / "profile"))
        elif chunks == 2:
            jax.profiler.stop_trace()
        return hook(progress, state) if hook else None

    try:
        yield traced
    finally:
        if chunks == 1:
            jax.profiler.stop_trace()
