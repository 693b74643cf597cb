"""Shoal: many agents, one program.

`shoal.train()` trains a population on this machine's devices; `shoal.load(run)` gives it back to act.
The functional core is below: `Env` and `Agent` are tuples of pure functions, `init` and `update` the whole
of learning for one agent, to jit, vmap and shard as you like. Names are imported when first used.
"""

import importlib
from typing import Any

_NAMES = {
    "train": "shoal.app.api",
    "resume": "shoal.app.api",
    "Run": "shoal.app.run",
    "load": "shoal.app.policies",
    "Policy": "shoal.app.policies",
    "make_env": "shoal.app.api",
    "make_agent": "shoal.app.api",
    "check_env": "shoal.envs.check",
    "as_arrays": "shoal.envs.params",
    "init": "shoal.algos.update",
    "update": "shoal.algos.update",
    "Identity": "shoal.algos.update",
    "AgentState": "shoal.algos.update",
    "Env": "shoal.types",
    "Step": "shoal.types",
    "Agent": "shoal.types",
    "Batch": "shoal.types",
    "Net": "shoal.types",
    "Box": "shoal.types",
    "Discrete": "shoal.types",
    "MultiDiscrete": "shoal.types",
    "ShoalError": "shoal.errors",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
