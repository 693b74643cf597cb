"""The Python API: the command line's verbs as functions of the same names and settings."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.app import catalogue, policies, programs, sweep
from shoal.app.board import board
from shoal.app.config import OutputConfig, algo_defaults, resolve, split_algo
from shoal.app.run import Run
from shoal.errors import ShoalError
from shoal.training.loop import Hook
from shoal.types import Agent, Env, Space, Tree


def train(
    env: str | Callable[[], Env] = "cartpole",
    *,
    config: str | Path | None = None,
    env_params: Mapping[str, Any] | None = None,
    hook: Hook | None = None,
    **settings: Any,
) -> Run:
    """Train a population and return its run.

    `env` is a short name, `module:make`, or the function that makes it (so is net=, for a network).
    Settings are those of `shoal train --help`, by name with underscores: agents=16, steps=500_000, seed=0,
    quiet=True, root="runs", … The algorithm's own come as a dict of its name, ppo={"lr": 1e-3}; the env's
    as env_params={"gravity": 5.0}. What differs between agents is sweep={"ppo.lr": "log:1e-4..1e-2",
    "ppo.ent_coef": [0, 0.01]}. `config` is a TOML file. `hook(progress, state)` is called after every
    chunk and may return a changed state. ShoalError says what does not fit.
    """
    catalogue.refuse_while_importing()
    output = _output(settings)
    if output.dry_run:
        raise ShoalError("dry_run returns no run", "use shoal train --dry-run")
    if "sweep" in settings:
        settings["sweep"] = sweep.written(settings["sweep"])
    dotted = {name: settings.pop(name) for name in list(settings) if isinstance(settings[name], Mapping)}
    if env_params:
        dotted["env"] = env_params
    named = {name: _spec(value) for name, value in {"env": env, **settings}.items()}
    resolved = resolve(named, dotted, config, "keyword")
    with board(output.quiet) as listen:
        run = programs.train(resolved, output, listen, hook)
    if run is None:
        raise KeyboardInterrupt
    return run


def _output(given: dict[str, Any]) -> OutputConfig:
    """Takes what says where a run goes and how it shows out of `given`."""
    return OutputConfig(
        **{field.name: given.pop(field.name) for field in fields(OutputConfig) if field.name in given}
    )


def _spec(value: Any) -> Any:
    """A function by its import path, so that the run can be resumed from its folder; else the value."""
    if isinstance(value, Path):
        return str(value)
    if not callable(value):
        return value
    if "<" in value.__qualname__:
        raise ShoalError(
            f"{value.__qualname__} cannot be found again when the run is resumed",
            "give a named function at the top of a module, or of this session",
        )
    module = value.__module__
    if module == "__main__" and (file := getattr(sys.modules[module], "__file__", None)):
        module = Path(file).stem  # of a script; a notebook's functions are found in __main__ while it lives
    spec = f"{module}:{value.__qualname__}"
    catalogue.LIVE[spec] = value
    return spec


def resume(run: str | Path, *, hook: Hook | None = None, **changes: Any) -> Run:
    """Go on with a run from its newest checkpoint; steps=N per agent in total trains it longer.

    Takes steps, device, devices and mesh, and what says where a run is and how it shows (root, quiet, …).
    """
    output = _output(changes)
    with board(output.quiet) as listen:
        return programs.resume(run, changes, output, listen, hook)


def make_env(spec: str) -> Env:
    """An env by its short name or by `module:make`."""
    return catalogue.load_env(spec)


def make_agent(
    algo: str, obs_space: Space, action_space: Space, net: str = "auto", **settings: Any
) -> tuple[Agent, Tree, Any]:
    """An algorithm as pure functions for one agent: (Agent, its Knobs, its Sizes)."""
    module = catalogue.load_algo(algo)
    knobs, sizes = split_algo(module, algo_defaults(module) | settings)
    return policies.make_agent(algo, sizes, net, obs_space, action_space), knobs, sizes
