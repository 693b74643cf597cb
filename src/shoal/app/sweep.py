"""What differs between the agents of a run, from `--sweep` to the values of each lane.

`ppo.lr=log:1e-4..1e-2` draws from a range, `ppo.ent_coef=0,0.01` deals out a list, `ppo.clip=0.1..0.3:5` a
list of five in a range; several lists make a grid. Knobs and env params vary within one program. What
shapes the program (`ppo.hidden=64,64;128,128`, `net=mlp,cnn`) divides the agents into one program each.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.app import catalogue
from shoal.app.config import (
    Settings,
    algo_kinds,
    convert,
    describe_kind,
    group_of,
    nearest,
    set_params,
    show_value,
    split_algo,
)
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.population.search import Axis

RANGE = re.compile(r"(log:)?([^,;:]+?)\.\.([^,;:]+?)(?::(\d+))?")
HOW = (
    "write a range, ppo.lr=log:1e-4..1e-2, points of one, ppo.clip=0.1..0.3:5, a list, ppo.ent_coef=0,0.01, "
    "or lists of layers, ppo.hidden=64,64;128,128"
)
MOST_PROGRAMS = 64
MOST_VALUES = 10_000


class Spec(NamedTuple):
    """One `--sweep` as it was written."""

    name: str  # ppo.lr
    log: bool
    ends: tuple[float, float] | None  # of a range, else None
    values: tuple[str, ...]  # of a list, still as text


def written(sweep: str | Iterable[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """A sweep as the command line has it; in Python it may be a dict of ranges as text and of lists."""
    if isinstance(sweep, str):
        return (sweep,)
    if not isinstance(sweep, Mapping):
        return tuple(sweep)
    several = lambda x: isinstance(x, list | tuple | np.ndarray)
    listed = lambda x: (";" if any(map(several, x)) else ",").join(map(show_value, x))
    return tuple(f"{name}={listed(x) if several(x) else x}" for name, x in sweep.items())


def read(text: str, kind: Any = float) -> Spec:
    """`name=range` or `name=list`; a list of lists (kind tuple) is divided by semicolons."""
    name, equals, given = (part.strip() for part in text.partition("="))
    if not equals or not name or not given:
        raise ShoalError(f"--sweep {text} names no values", HOW)
    match = RANGE.fullmatch(given)
    if not match and ".." in given:
        raise ShoalError(f"--sweep {text} is not a range", HOW)
    if not match:
        cut = ";" if ";" in given or kind is tuple else ","
        values = tuple(part.strip() for part in given.split(cut) if part.strip())
        if len(set(values)) < max(2, len(values)):
            raise ShoalError(f"--sweep {text} {'repeats a value' if values[1:] else 'changes nothing'}", HOW)
        return Spec(name, False, None, values)
    log, *ends, number = match.groups()
    low, high = (convert(f"--sweep {name}", end, float) for end in ends)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ShoalError(f"--sweep {text}: {show_value(low)} should be below {show_value(high)}", HOW)
    if log and low <= 0:
        raise ShoalError(
            f"--sweep {text}: a logarithmic range starts above 0", HOW if low < 0 else f"{name}=0..{high:g}"
        )
    if number is None:
        return Spec(name, bool(log), (low, high), ())
    if int(number) < 2:
        raise ShoalError(f"--sweep {text} changes nothing", "at least two values, such as :5")
    if int(number) > MOST_VALUES:
        raise ShoalError(f"--sweep {text} has more values than {MOST_VALUES:,}", HOW)
    points = np.geomspace(low, high, int(number)) if log else np.linspace(low, high, int(number))
    points[[0, -1]] = low, high
    return Spec(name, False, None, tuple(f"{x:.9g}" if x % 1 else str(int(x)) for x in points))


def name_of(text: str) -> str:
    return text.partition("=")[0].strip()


# --- One program per shape --------------------------------------------------------------------


class Program(NamedTuple):
    """One of the programs that a sweep needs."""

    shape: dict[str, str]  # what sets it apart, as it was written: {"ppo.hidden": "64,64"}
    settings: Settings

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.shape.items())


def programs(settings: Settings) -> list[Program]:
    """Each program that a sweep needs; one for most sweeps.

    Agents are shared out evenly. ShoalError for an axis that cannot vary or changes nothing.
    """
    train, module = settings.train, catalogue.load_algo(settings.train.algo)
    group, kinds = group_of(train.algo), algo_kinds(module)
    sizes = {f"{group}.{f.name}": kinds[f.name] for f in fields(module.Sizes)} | {"net": str}
    knobs = {f"{group}.{name}": kinds[name] for name in module.Knobs._fields}
    shaping: list[Spec] = []
    varying: list[str] = []
    for text in train.sweep:
        name = name_of(text)
        if name in sizes:
            shaping.append(_shaping(text, sizes[name]))
        elif name in knobs or name.startswith("env."):
            varying.append(text)
        else:
            hint = nearest(name, [*knobs, *sizes]) or f"the settings of {train.algo}, net, and env.… can vary"
            raise ShoalError(f"--sweep cannot vary {name}", hint)
    names = list(map(name_of, train.sweep))
    if twice := [name for name in names if names.count(name) > 1]:
        raise ShoalError(f"--sweep {twice[0]} is given twice", "write all of its values in one")
    grid = list(itertools.product(*(spec.values for spec in shaping)))
    if len(grid) > min(train.agents, MOST_PROGRAMS):
        what = " × ".join(spec.name for spec in shaping)
        raise ShoalError(
            f"--sweep {what} makes {len(grid)} programs for {train.agents} agents",
            f"use --agents {len(grid)} or more" if len(grid) <= MOST_PROGRAMS else "sweep fewer values",
        )
    made = []
    for i, point in enumerate(grid):
        chosen = dict(zip((spec.name for spec in shaping), point))
        algo = settings.algo | {
            name.partition(".")[2]: convert(name, value, sizes[name])
            for name, value in chosen.items()
            if name != "net"
        }
        split_algo(module, algo, group)  # refuses what does not fit together
        share = train.agents // len(grid) + (i < train.agents % len(grid))
        one = replace(train, agents=share, sweep=tuple(varying), net=chosen.get("net", train.net))
        origins = settings.origins | dict.fromkeys(chosen, "sweep")
        made.append(Program(chosen, replace(settings, train=one, algo=algo, origins=origins)))
    return made


def _shaping(text: str, kind: Any) -> Spec:
    several = describe_kind(kind).startswith("whole numbers")
    spec = read(text, tuple if several else kind)
    if spec.ends:
        raise ShoalError(
            f"--sweep {text}: {spec.name} shapes the program, so a range is endless", "list values"
        )
    values = [convert(spec.name, value, kind) for value in spec.values]
    if len(set(values)) < len(values):
        raise ShoalError(f"--sweep {text} repeats a value", HOW)
    return spec


# --- Axes within a program --------------------------------------------------------------------


def axes(settings: Settings, env_defaults: Any) -> tuple["Axis", ...]:
    """What varies between the agents of one program: `--sweep`, or what the algorithm names for --pbt."""
    from shoal.population.search import Axis

    module = catalogue.load_algo(settings.train.algo)
    group, ranges = group_of(settings.train.algo), getattr(module, "RANGES", {})
    made: list[Axis] = []
    stride = 1
    for text in settings.train.sweep or _suggested(settings, module, group):
        spec = read(text)
        field = spec.name.rpartition(".")[2]
        if spec.name.startswith("env."):
            named = env_defaults._asdict() if hasattr(env_defaults, "_asdict") else {}
            if field not in named:
                hint = nearest(spec.name, [f"env.{known}" for known in named])
                raise ShoalError(f"there is no setting {spec.name}", hint)
            whole = np.asarray(named[field]).dtype.kind in "iu"
            values = [set_params(env_defaults, {field: x})._asdict()[field] for x in _ends(spec)]
        else:
            whole = False
            values = [convert(spec.name, x, float) for x in _ends(spec)]
            low, high = ranges.get(field, (-math.inf, math.inf))
            if out := [x for x in values if not low <= x <= high]:
                raise ShoalError(f"--sweep {text}: {show_value(out[0])} is not from {low:g} to {high:g}")
        numbers = [float(np.float32(x)) for x in values]
        if len(set(numbers)) < len(numbers):
            raise ShoalError(f"--sweep {text} repeats a value", HOW)
        choices = () if spec.ends else tuple(numbers)
        made.append(
            Axis(spec.name, min(numbers), max(numbers), spec.log, whole, choices, stride * bool(choices))
        )
        stride *= max(1, len(choices))
    if stride > settings.train.agents:
        raise ShoalError(
            f"the lists of --sweep make a grid of {stride} points for {settings.train.agents} agents",
            f"use --agents {stride} or a multiple of it",
        )
    return tuple(made)


def refuse_idle(axes: Iterable["Axis"], knobs: set[str], params: set[str], algo: str) -> None:
    """ShoalError for an axis that the program never reads; `knobs` and `params` are those it does not."""
    for axis in axes:
        if axis.field in (params if axis.of_env else knobs):
            why = "this env does not use it" if axis.of_env else f"{algo} does not use it with these settings"
            raise ShoalError(f"--sweep {axis.name} changes nothing: {why}", "leave it out")


def _ends(spec: Spec) -> tuple[Any, ...]:
    return spec.ends or spec.values


def _suggested(settings: Settings, module: Any, group: str) -> tuple[str, ...]:
    """What PBT and successive halving vary where nothing is said."""
    train = settings.train
    if not (train.pbt or train.halving):
        return ()
    if not (suggested := getattr(module, "SEARCH", {})):
        raise ShoalError(f"{train.algo} does not say what to search over", HOW)
    return tuple(f"{group}.{name}={values}" for name, values in suggested.items())
