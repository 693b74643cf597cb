"""Short names for what ships with shoal; everything else is an import path or a plug-in. No registry.

A plug-in package names its envs and algorithms as entry points of the groups `shoal.envs`, `shoal.algos`.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shoal.app.blame import describe
from shoal.app.config import nearest
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.nets import NetMaker
    from shoal.types import Env

ENVS = {
    "cartpole": "shoal.envs.cartpole:make",
    "acrobot": "shoal.envs.acrobot:make",
    "mountaincar": "shoal.envs.mountaincar:make",
    "mountaincar-continuous": "shoal.envs.mountaincar_continuous:make",
    "pendulum": "shoal.envs.pendulum:make",
    "breakout": "shoal.envs.breakout:make",
}
ALGOS = {
    "ppo": "shoal.algos.ppo",
    "dqn": "shoal.algos.dqn",
    "pqn": "shoal.algos.pqn",
    "rppo": "shoal.algos.rppo",
    "es": "shoal.algos.es",
    "sac": "shoal.algos.sac",
    "td3": "shoal.algos.td3",
}
LIVE: dict[str, Any] = {}  # what this process was handed as an object, by the path it is recorded under
_importing: list[str] = []
SUITES = ("gymnasium", "gymnax", "playground", "jumanji", "pgx", "pettingzoo", "envpool")  # adapters to come


def envs() -> dict[str, str]:
    """Every env with a short name, and its import path: ours, then those of installed plug-ins."""
    return _with_plugins(ENVS, "shoal.envs")


def algos() -> dict[str, str]:
    """Every algorithm with a short name, and its module."""
    return _with_plugins(ALGOS, "shoal.algos")


def load_env(spec: str) -> "Env":
    """The env that a short name or `module:make` means; any object with the attributes of an Env serves."""
    from shoal.types import Env

    made = _make(_find(spec, envs(), "env", "shoal envs"))
    required = [name for name in Env._fields if name not in Env._field_defaults]
    if missing := [name for name in required if not hasattr(made, name)]:
        raise ShoalError(
            f"{spec} gives no env: expected an object with {', '.join(required)}; "
            f"got {type(made).__name__} without {', '.join(missing)}",
            "see shoal.types.Env; `shoal env new NAME` writes one to start from",
        )
    return Env(**{name: getattr(made, name) for name in Env._fields if hasattr(made, name)})


def load_algo(spec: str) -> ModuleType:
    """The module of an algorithm, by short name or import path: it has Knobs, Sizes and make."""
    known = algos()
    if spec not in known and "." not in spec:
        raise _unknown(spec, known, "algorithm", "shoal algos")
    module = _import(known.get(spec, spec))
    if missing := [name for name in ("Knobs", "Sizes", "make") if not hasattr(module, name)]:
        raise ShoalError(
            f"{spec} is no algorithm: it lacks {', '.join(missing)}",
            "an algorithm is a module with Knobs, Sizes and make, as shoal.algos.ppo is",
        )
    return module


def load_net(spec: str) -> "NetMaker":
    """A network maker of the user's own, `module:make`: (obs_space, outputs, scale) -> (init, apply)."""
    make = _find(spec, {}, "network", "")
    if not callable(make):
        raise ShoalError(f"{spec} makes no network: expected a function, got {type(make).__name__}")
    return make


# --- Import paths -----------------------------------------------------------------------------


def _with_plugins(ours: Mapping[str, str], group: str) -> dict[str, str]:
    return {**{point.name: point.value for point in entry_points(group=group)}, **ours}


def _find(spec: str, known: Mapping[str, str], noun: str, listing: str) -> Any:
    """The object at `module:name`, or at the path that a short name stands for."""
    path = known.get(spec, spec)
    module, _, name = path.partition(":")
    if module in SUITES and noun == "env":
        raise ShoalError(
            f"{spec}: the adapter for {module} is not built yet",
            "wrap the env as one of your own: shoal env new NAME",
        )
    if not name:
        raise _unknown(spec, known, noun, listing)
    if spec in LIVE:
        return LIVE[spec]
    if module.endswith(".py"):
        raise ShoalError(f"{spec}: {module} is a file, not a module", f"use {module[:-3]}:{name}")
    if module == "__main__":
        raise ShoalError(
            f"{spec} was defined in a session or notebook that is not this one",
            f"put it in a file that can be imported, and name it as module:{name}",
        )
    found: Any = _import(module)
    for part in name.split("."):
        if not hasattr(found, part):
            near = nearest(part, vars(found))
            raise ShoalError(f"{spec}: {module} has no {part}", near)
        found = getattr(found, part)
    return found


def _import(module: str) -> ModuleType:
    """Import a module, also from the folder the command was started in."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _importing.append(module)
    try:
        return importlib.import_module(module)
    except ShoalError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and module.startswith(error.name or module):
            raise ShoalError(
                f"there is no module {error.name}", f"looked in {os.getcwd()} and the installed packages"
            ) from error
        raise ShoalError(
            f"importing {module} failed: {describe(error)}", "--trace shows all of it"
        ) from error
    finally:
        _importing.pop()


def refuse_while_importing() -> None:
    """A script without a main guard would train again each time its env is imported: stop it there."""
    if _importing:
        raise ShoalError(
            f"importing {_importing[-1]} starts a training of its own",
            'put its call of shoal.train under: if __name__ == "__main__":',
        )


def _make(target: Any) -> Any:
    """An env: what a function returns, or the object itself."""
    if not callable(target):
        return target
    try:
        return target()
    except ShoalError:
        raise
    except Exception as error:
        raise ShoalError(f"making the env failed: {describe(error)}", "--trace shows all of it") from error


def _unknown(spec: str, known: Mapping[str, str], noun: str, listing: str) -> ShoalError:
    if os.path.isfile(f"{spec}.py"):
        return ShoalError(f"there is no {noun} {spec!r}", f"for the one in {spec}.py, say {spec}:make_{noun}")
    hint = f"{nearest(spec, known)} {listing} lists them; your own is module:make"
    return ShoalError(f"there is no {noun} {spec!r}", hint.strip())
