"""Train a population into a run folder, and go on from one."""

import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.algos.update import AgentState
from shoal.app import blame, policies, video
from shoal.app.assembly import Assembled, Compiler, assemble, facts, planned, refuse_too_large, starting
from shoal.app.board import describe
from shoal.app.config import OutputConfig, Settings, reopen, to_toml_tables
from shoal.app.run import Run
from shoal.app.selecting import selector, varied
from shoal.app.warmstart import Preparation
from shoal.errors import ShoalError
from shoal.population import halving
from shoal.population.lanes import identities, resize
from shoal.runs import checkpoints, folder, manifest, statistics
from shoal.runs.folder import RunFolder
from shoal.runs.metrics import RowWriter, truncate_after
from shoal.training import events, loop, program
from shoal.training.signals import Stop, stopping

_log = logging.getLogger("shoal")


def train(
    settings: Settings,
    output: OutputConfig = OutputConfig(),  # noqa: B008
    listen: loop.Listener = lambda event: None,
    hook: loop.Hook | None = None,
) -> Run | None:
    """Train a population from the start into a new run folder.

    None after a dry run, or where a signal came before there was anything to save.
    """
    began = time.perf_counter()
    with stopping() as stop:
        made, compiler = assemble(settings), Compiler(listen)
        prepare = Preparation(made, output.root)
        chunk, size = compiler.training(made)
        listen(planned(made, size, prepare.notes))
        refuse_too_large(made, size)
        if stop:
            listen(events.Stopping(stop.reason))
        if output.dry_run or stop:
            return None
        run = folder.create(output.root, settings.train.env, settings.train.algo, output.out)
        with folder.lock(run):
            manifest.write_toml(run.config, *to_toml_tables(made.settings))
            manifest.write_json(run.manifest, facts(made))
            training = _Training(made, compiler, run, output, began, stop)
            return training.run(chunk, training.prepared(prepare, listen), loop.Tally(), listen, hook)


def resume(
    path: str | Path,
    changes: Mapping[str, Any] | None = None,
    output: OutputConfig = OutputConfig(),  # noqa: B008
    listen: loop.Listener = lambda event: None,
    hook: loop.Hook | None = None,
) -> Run:
    """Go on from a run's newest checkpoint, bit for bit on the same devices.

    `changes` to its settings: more `steps` per agent in total (which also lifts the run's own --stop-at and
    --for), another `device` or number of `devices`.
    """
    began = time.perf_counter()
    changes = lifted(changes)
    run = folder.open_run(path, output.root)
    settings = reopen(run.config, changes)
    with stopping() as stop, folder.lock(run):
        before = manifest.read_object(run.manifest)
        if before.get("finished") and "steps" not in changes:
            _log.warning("%s has finished already; --steps N trains it longer", run.path)
            return Run.of(run)
        made, compiler = assemble(settings), Compiler(listen)
        saved = checkpoints.steps(run.checkpoints)
        done = max(saved, default=0)
        if before.get("finished") and not saved:
            raise ShoalError(f"{run.path} has finished, but its checkpoints are gone", "start a new run")
        _refuse_fewer(made, run, done)
        if before.get("finished") and done == made.plan.updates:
            _log.warning("%s has done all of these steps already", run.path)
            return Run.of(run)
        prepare = None if saved else Preparation(made, output.root)
        chunk, size = compiler.training(made)
        refuse_too_large(made, size)
        if stop:
            listen(events.Stopping(stop.reason))
            return Run.of(run)
        if prepare is None:
            state, tally, notes = restored(made, run)
            if settings.train.halving and halving.over(tally.judged, made.plan.updates):
                made = made._replace(plan=made.plan._replace(select_every=0))
                notes = (*notes, "nobody is replaced any more: who was judged was so by other --steps")
        training = _Training(made, compiler, run, output, began, stop)
        if prepare is not None:
            state, tally = training.prepared(prepare, listen), loop.Tally()
            notes = ("no checkpoint was written yet: starting from the beginning",)
        if done and not run.metrics.exists():
            notes = (*notes, f"{run.metrics.name} is gone; what it held is not made again")
        listen(planned(made, size, notes))
        _reopened(made, run, before, tally)
        return training.run(chunk, state, tally, listen, hook)


def _reopened(made: Assembled, run: RunFolder, before: dict[str, Any], tally: loop.Tally) -> None:
    """Make a folder that of an unfinished run again, as of its checkpoint; what may be damaged first."""
    evaluated = tally.updates - 1 if tally.updates == made.plan.updates else tally.updates
    truncate_after(run.metrics, tally.updates)
    truncate_after(run.lineage, tally.updates)
    truncate_after(run.eval, evaluated)
    manifest.write_toml(run.config, *to_toml_tables(made.settings))
    now = facts(made)
    again = [*before.get("resumed", []), {"updates": tally.updates, **now}]
    kept = {name: fact for name, fact in before.items() if name not in ("result", "time_split")}
    budget = {name: now[name] for name in ("finished", "steps", "steps_asked", "updates")}
    manifest.write_json(run.manifest, kept | budget | {"resumed": again})
    shutil.rmtree(run.policy, ignore_errors=True)  # of an older state; the checkpoint holds all of it


def fresh_state(made: Assembled, compiler: Compiler) -> Callable[..., AgentState]:
    """Compile what makes a population's first state; it may be given the number of the first agent."""
    init = compiler("start", lambda: program.compile_init(made.recipe, made.layout))

    def fresh(first: int = 0) -> AgentState:
        who = identities(made.settings.train.seed, made.plan.agents, made.plan.updates, made.layout.lanes)
        who = who._replace(agent=who.agent + np.int32(first))
        return init(who, *starting(made, who.agent))

    return fresh


def restored(made: Assembled, run: RunFolder) -> tuple[AgentState, loop.Tally, tuple[str, ...]]:
    """State and tally of the newest checkpoint, laid over this run's devices, and what is worth a note."""
    agents, budget = made.plan.agents, made.plan.updates
    full = program.abstract_state(made.recipe, made.layout)
    like = full
    if made.layout.lanes != agents:  # padding lanes are not saved
        one = jax.sharding.SingleDeviceSharding(made.layout.mesh.devices.flat[0])
        cut = lambda x: jax.ShapeDtypeStruct((agents, *x.shape[1:]), x.dtype, sharding=one)
        like = jax.tree.map(cut, full)
    state, meta = checkpoints.restore(run.checkpoints, like, meta=loop.Tally._fields)
    tally = loop.Tally(**meta)
    notes: tuple[str, ...] = ()
    if more := budget - tally.total:
        longer = np.asarray(state.identity.budget) + np.int32(more)
        state = state._replace(identity=state.identity._replace(budget=longer))
        spent = tally.updates / budget
        notes = (f"what is annealed follows the new budget, of which {spent:.0%} is spent",)
    shardings = jax.tree.map(lambda x: x.sharding, full)
    return jax.device_put(resize(state, made.layout.lanes), shardings), tally, notes


def _refuse_fewer(made: Assembled, run: RunFolder, updates: int) -> None:
    if updates > made.plan.updates:
        raise has_more(run, updates * made.plan.steps_per_update, made.settings.train.steps)


def lifted(changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """The changes to a run's settings; more steps lift what would stop it early."""
    early = {"stop_at": None, "for_s": None} if changes and "steps" in changes else {}
    return early | dict(changes or {})


def has_more(run: RunFolder, done: int, asked: int) -> ShoalError:
    return ShoalError(
        f"{run.path} already has {done:,} env steps per agent, more than --steps {asked:,}",
        "ask for more steps, or start a new run",
    )


class Store:
    """The loop's store: rows and checkpoints of one run folder."""

    def __init__(self, run: RunFolder, agents: int, keep: int):
        self.agents = agents
        self.metrics, self.eval = RowWriter(run.metrics), RowWriter(run.eval)
        self.replaced = RowWriter(run.lineage)
        self.saver = checkpoints.Saver(run.checkpoints, keep)

    def rows(self, columns: dict[str, Any]) -> None:
        self.metrics.write(columns)

    def evaluation(self, columns: dict[str, Any]) -> None:
        self.eval.write(columns)

    def lineage(self, columns: dict[str, Any]) -> None:
        if len(columns["agent"]):
            self.replaced.write(columns)

    def save(self, state: AgentState, tally: loop.Tally) -> None:
        if state.identity.active.shape[0] != self.agents:
            state = resize(state, self.agents)
        self.saver.save(tally.updates, state, tally._asdict(), {tally.best_updates})

    def close(self) -> None:
        try:
            self.saver.wait()
        finally:
            for writer in (self.metrics, self.eval, self.replaced):
                writer.close()


class _Training:
    """One stretch of training in a run folder, from a state to the written result."""

    def __init__(
        self,
        made: Assembled,
        compiler: Compiler,
        run: RunFolder,
        output: OutputConfig,
        began: float,
        stop: Stop,
    ):
        self.made, self.compiler, self.folder, self.output = made, compiler, run, output
        self.began, self.stop = began, stop
        self._evaluation: Any = None

    def evaluate(self, state: AgentState) -> Any:
        """Compiled when first needed."""
        self._evaluation = self._evaluation or self.compiler.evaluation(self.made)
        return self._evaluation(state)

    def prepared(self, prepare: Preparation, listen: loop.Listener) -> AgentState:
        """The state to begin with: fresh, and saved once it took some preparation."""
        init = fresh_state(self.made, self.compiler)
        prepare.compile(self.compiler)
        with _logging_to(self.folder.log, listen) as listen:
            state, facts = prepare(init(), self.stop, listen)
        if facts and not self.stop:
            known = manifest.read_object(self.folder.manifest)
            manifest.write_json(self.folder.manifest, known | {"warm_start": facts})
            tally = loop.Tally(total=self.made.plan.updates)._asdict()
            checkpoints.save(self.folder.checkpoints, 0, resize(state, self.made.plan.agents), tally)
        return state

    def run(self, chunk, state: AgentState, tally: loop.Tally, listen: loop.Listener, hook) -> Run:
        compile_s = self.compiler.seconds
        with _logging_to(self.folder.log, listen) as listen:
            state, tally, columns = self._trained(chunk, state, tally, listen, hook)
            if columns is not None:
                self._conclude(state, tally, columns, compile_s, listen)
        return Run.of(self.folder)

    def _trained(self, chunk, state: AgentState, tally: loop.Tally, listen: loop.Listener, hook):
        """The state and tally after training, and the columns of its evaluation: None if stopped early."""
        plan, columns, differing = self.made.plan, None, varied(self.made)
        select = selector(self.made, self.compiler)
        store = Store(self.folder, plan.agents, self.made.settings.train.keep)
        with contextlib.closing(store):
            with _traced(self.output.profile, self.folder, hook) as hook:
                state, tally = loop.train(
                    plan,
                    chunk,
                    self.evaluate,
                    state,
                    tally,
                    store,
                    self.stop,
                    listen,
                    hook,
                    select,
                    differing,
                )
            store.saver.wait()  # whatever happens from here on, the trained state is on disk
            if not self.stop.early:
                tally, columns = loop.evaluated(plan, self.evaluate, state, tally, store, differing)
        return state, tally, None if self.stop.early else columns  # early: perhaps only since

    def _conclude(self, state: AgentState, tally: loop.Tally, columns, compile_s: float, listen) -> None:
        """Write what a finished run leaves: policies, result, film, report."""
        split = dict(compile=self.compiler.seconds, train=tally.train_s, evaluate=tally.evaluate_s)
        split |= dict(save=tally.save_s, write=tally.write_s)
        if self.output.profile:  # measured apart, so compiling it is not counted
            rollout_s = min(split["train"], self._rollout_seconds(state) * tally.updates)
            split |= {"train": split["train"] - rollout_s, "rollout": rollout_s}
        state = resize(state, self.made.plan.agents)
        write_policy(self.made, self.folder.policy, state, columns)
        result = self._result(state, tally, columns, compile_s)
        self._finish(result, split)
        if self.output.report:
            listen(events.Note("drawing the film and the report"))
            with _not_failing("no film"):
                _film(self.made, self.folder, state, columns)
        result["total_s"] = round(time.perf_counter() - self.began, 3)
        split["other"] = round(max(0.0, result["total_s"] - sum(split.values())), 3)
        self._finish(result, split)
        if self.output.report:
            from shoal.runs.report import write_report

            with _not_failing("no report"):
                write_report(self.folder)

    def _result(self, state, tally: loop.Tally, columns, compile_s: float):
        plan, train, returns = self.made.plan, self.made.settings.train, columns["return_mean"]
        ids, active = columns["agent"], np.asarray(state.identity.active)
        env_steps = tally.agent_updates * plan.steps_per_update
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
            **scores_of(columns)
            # copies, or agents of unlike ages, are no sample of agents
            | ({"return_ci": None} if train.pbt or train.halving else {}),
            agent_ids=ids.tolist(),
            varied={axis.name: columns[axis.name].tolist() for axis in self.made.axes},
            alive=int(np.sum(active)),
            diverged=ids[~active].tolist(),
            best_agent=int(ids[policies.choose_agents(returns.tolist(), ids.tolist(), "best")[0]]),
            best_checkpoint=dict(updates=tally.best_updates, return_mean=tally.best_return),
            stopped_early=self.stop.reason or None,
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


def scores_of(columns: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation says of a population. The 95 % interval of the mean needs two agents."""
    returns = columns["return_mean"]
    sure = len(returns) > 1 and np.isfinite(returns).all()
    return dict(
        return_mean=float(returns.mean()),
        return_iqm=statistics.iqm(returns),
        return_ci=list(statistics.bootstrap_interval(returns, statistics.mean)) if sure else None,
        return_greedy=float(columns["return_greedy"].mean()),
        returns=returns.tolist(),
    )


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
        varied={axis.name: columns[axis.name].tolist() for axis in made.axes},
        env_steps=int(columns["env_steps"][0]),
        obs_space=made.env.obs_space(made.env_params),
        action_space=made.env.action_space(made.env_params),
        versions=manifest.versions(),
    )
    policies.write_policy(path, made.agent, state.learner, contract)


def _film(made: Assembled, run: RunFolder, state: AgentState, columns: dict[str, Any]) -> None:
    """The best, the median and the worst agent side by side."""
    if made.env.render is None:
        return
    returns, ids = columns["return_mean"], columns["agent"].tolist()
    names = ("best", "median", "worst") if len(returns) > 2 else ("best",)
    chosen = [policies.choose_agents(returns.tolist(), ids, name)[0] for name in names]
    labels = [f"{name}: agent {ids[i]}, return {returns[i]:.4g}" for name, i in zip(names, chosen)]
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
def _not_failing(what: str) -> Iterator[None]:
    """Pictures are drawn after training and may not fail it."""
    try:
        yield
    except Exception as error:
        _log.warning("%s: %s", what, blame.describe(error))


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
