"""Put the rooms together: from settings to everything a run is made of, before anything is compiled."""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from shoal.app import catalogue, policies
from shoal.app.config import Settings, set_params, split_algo
from shoal.mesh.devices import Devices, open_devices
from shoal.mesh.layout import Layout, lay_out
from shoal.runs import manifest
from shoal.training import events, loop, program
from shoal.types import Agent, Env, Tree

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

    @property
    def max_steps(self) -> int:
        """Of an evaluation episode."""
        return self.env.time_limit or LONGEST_EPISODE


def assemble(settings: Settings) -> Assembled:
    """Load env and algorithm, check that they fit, and lay the population over the devices."""
    train = settings.train
    use_compile_cache()
    devices = open_devices(train.device, train.devices)
    env = catalogue.load_env(train.env)
    if train.time_limit is not None:
        env = env._replace(time_limit=train.time_limit)
    env_params = set_params(env.default_params(), settings.env)
    knobs, sizes = split_algo(catalogue.load_algo(train.algo), settings.algo)
    spaces = env.obs_space(env_params), env.action_space(env_params)
    agent = policies.make_agent(train.algo, sizes, train.net, *spaces)
    layout = lay_out(devices.devices, train.agents, sizes.strata)
    recipe = program.Recipe(agent, env, knobs, env_params, sizes.num_envs, sizes.num_steps)
    per_update = sizes.num_envs * sizes.num_steps
    plan = loop.Plan(
        agents=train.agents,
        updates=-(-train.steps // per_update),
        steps_per_update=per_update,
        chunk=train.chunk,
        eval_every=max(1, round(train.eval_every / per_update)) if train.eval_every else 0,
        stop_at=train.stop_at,
        seconds=train.for_s,
        checkpoint_every=train.checkpoint_every,
    )
    return Assembled(settings, devices, env, env_params, knobs, sizes, agent, layout, recipe, plan)


def planned(made: Assembled, bytes_predicted: int, notes: tuple[str, ...] = ()) -> events.Planned:
    """The plan line's facts, and every fact that must not go unsaid."""
    train, plan, layout = made.settings.train, made.plan, made.layout
    if layout.lanes != plan.agents:
        notes = (*notes, f"{layout.lanes - plan.agents} padding lanes, so that devices divide the agents")
    if not made.env.time_limit:
        notes = (*notes, f"no time limit: evaluation episodes are cut after {made.max_steps:,} steps")
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
    mesh = made.layout.mesh
    return manifest.collect(
        finished=False,
        env=made.settings.train.env,
        algo=made.settings.train.algo,
        fingerprint=fingerprint(made),
        seed=made.settings.train.seed,
        agents=made.plan.agents,
        lanes=made.layout.lanes,
        device=made.devices.kind,
        device_kind=mesh.devices.flat[0].device_kind,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        precision=dict(params="float32", matmul=MATMUL_PRECISION),
        reset="fresh",
        steps_asked=made.settings.train.steps,
        steps=made.plan.updates * made.plan.steps_per_update,
        notes=list(made.devices.notes),
    )


def fingerprint(made: Assembled) -> str:
    """What must agree for two agents to share a program, as 12 hex digits."""
    train = made.settings.train
    shared = dict(
        packages=manifest.collect()["packages"],
        env=train.env,
        time_limit=made.env.time_limit,
        algo=train.algo,
        net=train.net,
        sizes=dataclasses.asdict(made.sizes),
        obs_space=repr(made.env.obs_space(made.env_params)),
        action_space=repr(made.env.action_space(made.env_params)),
        precision=MATMUL_PRECISION,
    )
    return hashlib.sha256(json.dumps(shared, sort_keys=True, default=str).encode()).hexdigest()[:12]


# --- Compiling --------------------------------------------------------------------------------

MATMUL_PRECISION = "highest"  # float32 means float32, on GPUs (TF32) and TPUs (bfloat16) too


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
    if config.jax_compilation_cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "shoal" / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
