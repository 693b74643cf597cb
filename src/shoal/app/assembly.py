"""Put the rooms together: from settings to everything a run is made of, before anything is compiled."""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.app import catalogue, parameters, policies, sweep, text
from shoal.app.blame import describe
from shoal.app.config import VARIES, Settings, TrainConfig, group_of, set_params, split_algo
from shoal.envs.check import form
from shoal.errors import ShoalError
from shoal.mesh.devices import MATMUL_PRECISION, Devices, memory, open_devices
from shoal.mesh.layout import Layout, lay_out, read_mesh
from shoal.population import halving, search
from shoal.population.lanes import stacked
from shoal.population.search import Axis
from shoal.runs import manifest
from shoal.training import events, loop, program
from shoal.types import Agent, Env, Tree

_log = logging.getLogger("shoal")

SELECTIONS = 20  # of PBT, in a run that does not say how often
LONGEST_EPISODE = 10_000  # steps of an evaluation episode in an env without a time limit


class Assembled(NamedTuple):
    """What a run is made of."""

    settings: Settings
    devices: Devices
    env: Env
    env_params: Tree
    knobs: Tree
    sizes: Any
    agent: Agent
    layout: Layout
    recipe: program.Recipe
    plan: loop.Plan
    axes: tuple[Axis, ...]  # what differs between agents
    learner: Any  # the shapes of one agent's, what is kept per env being that of one

    @property
    def max_steps(self) -> int:
        """Of an evaluation episode."""
        return self.env.time_limit or LONGEST_EPISODE


def assemble(settings: Settings) -> Assembled:
    """Load env and algorithm, check that they fit, and lay the population over the devices.

    ShoalError where the env breaks its contract, or where the agents alone are more than memory holds.
    """
    train = settings.train
    use_compile_cache()
    devices = open_devices(train.device, train.devices)
    env, env_params = _load_env(settings)
    knobs, sizes = split_algo(catalogue.load_algo(train.algo), settings.algo, group_of(train.algo))
    spaces = env.obs_space(env_params), env.action_space(env_params)
    agent = policies.make_agent(train.algo, sizes, train.net, *spaces)
    learner = jax.eval_shape(agent.init, jax.random.key(0), knobs)
    agent = parameters.held(agent, learner, train.freeze)
    layout = lay_out(devices.devices, train.agents, sizes.strata, read_mesh(train.mesh))
    shape = sizes.num_envs, sizes.num_steps, getattr(sizes, "minibatches", 1)
    recipe = program.Recipe(agent, env, knobs, env_params, *shape, train.microbatch)
    per_update = sizes.num_envs * sizes.num_steps
    updates = -(-train.steps // per_update)
    plan = loop.Plan(
        agents=train.agents,
        updates=updates,
        steps_per_update=per_update,
        chunk=train.chunk,
        eval_every=max(1, round(train.eval_every / per_update)) if train.eval_every else 0,
        select_every=select_every(updates, train),
        stop_at=train.stop_at,
        seconds=train.for_s,
        checkpoint_every=train.checkpoint_every,
    )
    if axes := sweep.axes(settings, env.default_params()):
        sweep.refuse_idle(axes, *program.unread(recipe), train.algo)
        varied = dict.fromkeys((axis.name for axis in axes), VARIES)
        settings = dataclasses.replace(settings, origins=settings.origins | varied)
    made = Assembled(
        settings, devices, env, env_params, knobs, sizes, agent, layout, recipe, plan, axes, learner
    )
    refuse_too_large(made, _least_bytes(made))
    return made


def select_every(updates: int, train: TrainConfig) -> int:
    """Updates between selections, 0 for none; ShoalError where a run is too short for any."""
    if not (train.pbt or train.halving):
        return 0
    if train.agents < 2:
        raise ShoalError("one agent has nobody to be compared with", "use --agents 4 or more with a search")
    rungs = halving.rungs(updates)
    every = rungs[0] if train.halving and rungs else train.pbt_every or max(1, updates // SELECTIONS)
    if every >= updates:
        what = f"agents are compared every {every} updates" if updates > 1 else "there is nothing to compare"
        raise ShoalError(f"{what}, and the run has {updates}", "use more --steps")
    return every


def starting(made: Assembled, agents: Any) -> tuple[Tree, Tree]:
    """Knobs and env params that agents start with, by their numbers [lanes]; leaves are led by lanes."""
    knobs, env_params = stacked(made.knobs, len(agents)), stacked(made.env_params, len(agents))
    seeds: Any = np.full(len(agents), made.settings.train.seed, np.uint32)

    def drawn(tree: Any, axes: list[Axis]) -> Any:
        draw = lambda axis: np.asarray(jax.vmap(functools.partial(search.drawn, axis))(seeds, agents))
        return tree._replace(**{a.field: draw(a).astype(getattr(tree, a.field).dtype) for a in axes})

    of_env = [axis for axis in made.axes if axis.of_env]
    knobs = drawn(knobs, [axis for axis in made.axes if not axis.of_env])
    return knobs, drawn(env_params, of_env) if of_env else env_params  # params need not be a NamedTuple


def _load_env(settings: Settings) -> tuple[Env, Tree]:
    """The env and its params, both as the settings say, and of the right form."""
    spec = settings.train.env
    env = catalogue.load_env(spec)
    if settings.train.time_limit is not None:
        env = env._replace(time_limit=settings.train.time_limit)
    hint = f"shoal env check {spec} tells more"
    try:
        defaults = env.default_params()
    except Exception as error:
        raise ShoalError(f"{spec}: default_params() failed: {describe(error)}", hint) from error
    params = set_params(defaults, settings.env)
    if broken := [row.message for row in form(env, params) if row.status == "fail"]:
        raise ShoalError(f"{spec} breaks the contract of an env: {'; '.join(broken)}", hint)
    return env, params


def refuse_too_large(made: Assembled, needed: int) -> None:
    """ShoalError where `needed` bytes, on all devices together, are more than the memory there is."""
    available = memory(list(made.layout.mesh.devices.flat))
    if not 0 < available < needed:
        return
    agents = made.plan.agents
    if fits := agents * available // needed:
        hint = f"at most about {fits:,} agents fit: --agents {fits}"
    else:
        hint = "not even one agent fits: use fewer or smaller envs, steps per update, or layers"
    raise ShoalError(
        f"{agents:,} agents need {text.size(needed)} of memory, and {text.size(available)} are available",
        hint,
    )


def _least_bytes(made: Assembled) -> int:
    """What the population's learners and envs take, whatever the program adds; known before compiling."""
    envs, learner = made.recipe.num_envs, made.learner
    world = jax.eval_shape(made.env.reset, jax.random.key(0), made.env_params)
    per_env = learner.local, learner.replay, world
    return made.layout.lanes * (size(learner._replace(local=(), replay=())) + envs * size(per_env))


def size(tree: Tree) -> int:
    """Bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def planned(made: Assembled, bytes_predicted: int, notes: tuple[str, ...] = ()) -> events.Planned:
    """The plan line's facts, and every fact that must not go unsaid."""
    train, plan, layout = made.settings.train, made.plan, made.layout
    if layout.lanes != plan.agents:
        notes = (*notes, f"{layout.lanes - plan.agents} padding lanes, so that devices divide the agents")
    if (shards := layout.data_shards) > 1:
        share = f"{made.sizes.num_envs} envs: {made.sizes.num_envs // shards} each"
        notes = (*notes, f"{layout.agent_shards} × {shards} devices: {shards} share one agent's {share}")
    if not made.env.time_limit:
        notes = (*notes, f"no time limit: evaluation episodes are cut after {made.max_steps:,} steps")
    if rings := jax.tree.leaves(made.learner.replay):
        envs = made.recipe.num_envs
        steps, total = envs * rings[0].shape[0], text.size(layout.lanes * envs * size(rings))
        notes = (*notes, f"replay: {steps:,} steps per agent, {total} for all")
    steps = plan.updates * plan.steps_per_update
    if (starts := getattr(made.sizes, "learning_starts", 0)) >= steps:
        notes = (*notes, f"nothing is learned: learning starts after {starts:,} steps per agent")
    if made.axes:
        notes = (*notes, "agents differ in " + ", ".join(f"{a.name} ({_range_of(a)})" for a in made.axes))
    if plan.agents % (points := math.prod(len(axis.choices) or 1 for axis in made.axes)):
        notes = (*notes, f"{points} points of a grid are dealt out unevenly to {plan.agents} agents")
    if (train.pbt or train.halving) and (unlike := [axis.name for axis in made.axes if axis.of_env]):
        notes = (*notes, f"agents in unlike envs are compared: those with an easier {', '.join(unlike)} win")
    if train.pbt:
        notes = (*notes, f"PBT: every {plan.select_every} updates the worst quarter copies the best")
    if train.halving:
        rungs = ", ".join(map(str, halving.rungs(plan.updates)))
        notes = (*notes, f"successive halving: judged after {rungs} updates, the best third goes on")
    return events.Planned(
        env=train.env,
        algo=train.algo,
        agents=plan.agents,
        lanes=layout.lanes,
        envs=made.sizes.num_envs,
        devices=layout.mesh.size,
        device_kind=made.devices.kind,
        steps_asked=train.steps,
        steps=plan.updates * plan.steps_per_update,
        updates=plan.updates,
        bytes_predicted=bytes_predicted,
        notes=(*made.devices.notes, *notes),
    )


def facts(made: Assembled) -> dict[str, Any]:
    """What a run's manifest says from the start."""
    mesh, known = made.layout.mesh, manifest.collect()
    return known | dict(
        finished=False,
        env=made.settings.train.env,
        algo=made.settings.train.algo,
        fingerprint=fingerprint(made, known["packages"]),
        seed=made.settings.train.seed,
        agents=made.plan.agents,
        lanes=made.layout.lanes,
        device=made.devices.kind,
        device_kind=mesh.devices.flat[0].device_kind,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        precision=dict(params="float32", matmul=MATMUL_PRECISION),
        reset="fresh",
        pbt=made.settings.train.pbt,
        halving=made.settings.train.halving,
        varied={axis.name: _range_of(axis) for axis in made.axes},
        updates=made.plan.updates,
        steps_asked=made.settings.train.steps,
        steps=made.plan.updates * made.plan.steps_per_update,
        notes=list(made.devices.notes),
    )


def _range_of(axis: Axis) -> str:
    if axis.choices:
        return ", ".join(f"{x:g}" for x in axis.choices)
    return f"{'log ' * axis.log}{axis.low:g} … {axis.high:g}"


def fingerprint(made: Assembled, packages: dict[str, str]) -> str:
    """What must agree for two agents to share a program, as 12 hex digits; `packages` with versions."""
    train = made.settings.train
    shared = dict(
        packages=packages,
        env=train.env,
        time_limit=made.env.time_limit,
        algo=train.algo,
        net=train.net,
        freeze=train.freeze,
        sizes=dataclasses.asdict(made.sizes),
        obs_space=repr(made.env.obs_space(made.env_params)),
        action_space=repr(made.env.action_space(made.env_params)),
        precision=MATMUL_PRECISION,
    )
    return hashlib.sha256(json.dumps(shared, sort_keys=True, default=str).encode()).hexdigest()[:12]


# --- Compiling --------------------------------------------------------------------------------


class Compiler:
    """Compiles programs in full float32 matmul precision, and tells how long each took."""

    def __init__(self, listen: loop.Listener):
        self.listen = listen
        self.seconds = 0.0

    def __call__(self, name: str, build: Callable[[], Any]) -> Any:
        self.listen(events.Compiling(name))
        started = time.perf_counter()
        with jax.default_matmul_precision(MATMUL_PRECISION):
            built = build()
        took = time.perf_counter() - started
        self.seconds += took
        self.listen(events.Compiled(name, took))
        return built

    def training(self, made: Assembled) -> Any:
        """The chunk and its bytes; see `program.compile_chunk`."""
        return self("training", lambda: program.compile_chunk(made.recipe, made.layout))

    def evaluation(self, made: Assembled, seed: int = 0) -> Any:
        """State → (sampled, greedy) scores; see `program.compile_evaluation`."""
        episodes = made.settings.train.eval_episodes
        return self(
            "evaluation",
            lambda: program.compile_evaluation(made.recipe, made.layout, episodes, made.max_steps, seed),
        )


def use_compile_cache() -> None:
    """Keep compiled programs between processes; a user's own choice of folder stands."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None and (folder := _cache_folder()):
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_home() -> Path:
    """Where Shoal keeps what it can make again; RuntimeError where there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


@functools.cache  # asked, and complained about, once
def _cache_folder() -> str | None:
    """Where compiled programs are kept; None where nothing can be written."""
    try:
        folder = cache_home() / "jax"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _log.warning("compiled programs are not kept, so every start compiles again: %s", error)
        return None
