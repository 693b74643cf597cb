"""Short names for what ships with shoal; everything else is an import path. No registry."""

import importlib
from types import ModuleType

ENVS = {
    "cartpole": "shoal.envs.cartpole:make",
    "acrobot": "shoal.envs.acrobot:make",
    "mountaincar": "shoal.envs.mountaincar:make",
    "mountaincar-continuous": "shoal.envs.mountaincar_continuous:make",
    "pendulum": "shoal.envs.pendulum:make",
    "breakout": "shoal.envs.breakout:make",
}
ALGOS = {"ppo": "shoal.algos.ppo"}


def load_algo(name: str) -> ModuleType:
    return importlib.import_module(ALGOS[name])
