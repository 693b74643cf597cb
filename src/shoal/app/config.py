"""Every setting of a run: its name, its type, its value and where that value came from. No jax here.

Flat settings are `TrainConfig`; dotted ones (`ppo.lr`, `env.gravity`) belong to the algorithm and the env.
Command line, TOML file and Python keywords all go through `resolve`: default → preset → file → explicit.
"""

import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NewType

from shoal.errors import INT32, LARGEST, ShoalError

Tables = Mapping[str, Mapping[str, Any]]  # settings by group: "train", the algorithm's name, "env"
Duration = NewType("Duration", float)  # seconds; written 90, "90s", "10m" or "2h"
MOST_DEVICES = 1024  # of one process


@dataclass(frozen=True)
class TrainConfig:
    """What a run is: recorded with it, and enough to repeat it (with the dotted settings)."""

    env: str = "cartpole"  # a name of `shoal envs`, or module:make of your own
    algo: str = "ppo"  # a name of `shoal algos`, or an importable module
    agents: int = 16  # trained together in one program
    steps: int = 500_000  # env steps per agent, rounded up to whole updates
    seed: int = 0  # every random stream derives from it
    net: str = "auto"  # auto, mlp, cnn, or module:make of your own
    sweep: tuple[str, ...] = ()  # what differs between agents: ppo.lr=log:1e-4..1e-2 or ppo.clip=0.1,0.2
    pbt: bool = False  # now and then the worst agents become copies of the best, with knobs moved
    pbt_every: int = 0  # updates between these selections; 0 = a twentieth of the run
    halving: bool = False  # stop the worst agents early, and try new samples in their place
    init_from: str | None = None  # begin with parameters of RUN, RUN@AGENT or an exported policy; RUN:PARTS
    freeze: str | None = None  # parameters that training leaves as they are: actor.0,actor.1
    warmup_steps: int = 0  # env steps per agent before training that only fill running statistics
    time_limit: int | None = None  # steps until an episode is truncated; none = the env's own, 0 = never
    microbatch: int = 0  # rows of a minibatch on a device to compute the gradient of at a time; 0 = chosen
    device: Literal["auto", "cpu", "gpu", "tpu"] = "auto"  # auto = the best that JAX finds
    devices: int = 0  # how many; 0 = all (on a CPU: one per core)
    mesh: str = "auto"  # devices per axis, agent=2,data=2; auto = agents first, then each one's envs
    chunk: int = 0  # updates per call of the compiled program; 0 = chosen for you
    eval_every: int = 0  # env steps per agent between evaluations; 0 = only at the end
    eval_episodes: int = 128  # per agent and evaluation
    stop_at: float | None = None  # stop once the mean return over agents reaches this
    for_s: Duration | None = None  # stop after this long, e.g. 10m, 90s, 2h; each program of a sweep
    checkpoint_every: Duration = Duration(30.0)  # time between checkpoints
    keep: int = 3  # newest checkpoints kept, besides the best

    def __post_init__(self) -> None:
        for name in ("steps", "keep"):
            _within(1, math.inf, name, getattr(self, name))
        for name in (
            "chunk",
            "eval_every",
            "for_s",
            "checkpoint_every",
            "pbt_every",
            "microbatch",
            "warmup_steps",
        ):
            _within(0, math.inf, name, getattr(self, name))
        for name in ("agents", "eval_episodes"):
            _within(1, INT32, name, getattr(self, name))
        _within(0, INT32, "time_limit", self.time_limit)
        _within(0, 2**32 - 1, "seed", self.seed)
        _within(0, MOST_DEVICES, "devices", self.devices)
        if self.pbt and self.halving:
            raise ShoalError("--pbt and --halving exclude each other", "use one of them")
        if self.halving and self.init_from:
            raise ShoalError(
                "--halving replaces agents by fresh ones, which --init-from says nothing of",
                "use one of them, or --pbt, whose copies keep what they began with",
            )
        if self.pbt_every and not self.pbt:
            raise ShoalError("--pbt-every says nothing without --pbt", "add --pbt")


@dataclass(frozen=True)
class OutputConfig:
    """Where a run goes and what is shown of it: changes nothing in the result."""

    out: str | None = None  # exactly this folder, instead of a new one under --root
    root: str = "runs"  # the folder of run folders
    report: bool = True  # write report.html and a video at the end
    quiet: bool = False  # show errors only
    json: bool = False  # end stdout with one line of JSON
    profile: bool = False  # write a trace and a time split
    dry_run: bool = False  # stop after the plan line


@dataclass(frozen=True)
class Settings:
    """Everything resolved. `algo` is complete; `env` holds only what was overridden (see `set_params`)."""

    train: TrainConfig = field(default_factory=TrainConfig)
    algo: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # "agents" or "ppo.lr" → default, preset, file …


def resolve(
    explicit: Mapping[str, Any],
    dotted: Tables | None = None,
    file: str | Path | None = None,
    source: str = "command line",
) -> Settings:
    """Settings from `explicit` flat values and `dotted` ones by group, over `file`, preset and defaults.

    Values may be text. ShoalError for an unknown name (with the nearest) or a value of the wrong type.
    The env is not loaded, so that devices can be set up first; the algorithm is, without starting jax.
    """
    from shoal.app import catalogue, presets

    layers: list[tuple[str, Tables]] = [(source, {"train": explicit, **(dotted or {})})]
    if file is not None:
        layers.insert(0, (f"file {Path(file).name}", _read_file(Path(file))))
    given = {key: value for _, tables in layers for key, value in tables.get("train", {}).items()}
    env, algo = str(given.get("env", TrainConfig.env)), str(given.get("algo", TrainConfig.algo))
    module = catalogue.load_algo(algo)
    group = group_of(algo)
    if preset := presets.PRESETS.get((env, algo)):
        layers.insert(0, ("preset", {"train": preset.train, group: preset.algo}))

    kinds = {"train": typing.get_type_hints(TrainConfig), group: algo_kinds(module)}
    values: dict[str, dict[str, Any]] = {"train": asdict(TrainConfig()), group: algo_defaults(module)}
    origins = {_dotted(table, key): "default" for table in values for key in values[table]}
    values["env"] = {}
    for origin, tables in layers:
        for table, items in tables.items():
            _known(table, values, "group of settings", f"there are {', '.join(values)}")
            for key, value in items.items():
                name = _dotted(table, key)
                if table == "env":
                    values[table][key] = _guess(value)
                else:
                    known, hint = [_dotted(table, k) for k in kinds[table]], _all_of(table)
                    if table == "train" and key in kinds[group]:
                        hint = f"it is {group}'s: --{group}.{key}, or {group}={{{key!r}: …}} in Python"
                    _known(name, known, "setting", hint)
                    values[table][key] = convert(name, value, kinds[table][key])
                origins[name] = origin
    train = TrainConfig(**values["train"])
    _, sizes = split_algo(module, values[group], group)
    _countable(train, sizes)
    return Settings(train, values[group], values["env"], origins)


def reopen(path: Path, changes: Mapping[str, Any] | None = None) -> Settings:
    """The settings a run recorded in its `config.toml`, origins and all, with `changes` to the flat ones."""
    settings = resolve(changes or {}, file=path)
    _, recorded = read_recorded(path)
    origins = {
        name: recorded.get(name, origin) if origin.startswith("file ") else origin
        for name, origin in settings.origins.items()
    }
    return replace(settings, origins=origins)


def read_recorded(path: Path) -> tuple[Tables, dict[str, str]]:
    """The tables of a run's `config.toml`, and the origins it keeps as comments. Loads no algorithm."""
    tables, table, origins = _read_file(path), "", {}
    for line in path.read_text("utf-8").splitlines():
        if match := re.fullmatch(r"\[(.+)\]", line):
            table = match[1]
        elif match := re.fullmatch(r"(\w+) = .*  # (.+)", line):
            origins[_dotted(table, match[1])] = match[2]
    return tables, origins


def set_params(defaults: Any, overrides: Mapping[str, Any]) -> Any:
    """An env's default params (a NamedTuple of numbers) with `overrides` in place, typed as the defaults."""
    if not overrides:
        return defaults
    if not hasattr(defaults, "_asdict"):
        raise ShoalError("this env's params cannot be set by name", "make default_params() a NamedTuple")
    named = defaults._asdict()
    changed = {}
    for key, value in overrides.items():
        name = _dotted("env", key)
        _known(name, [_dotted("env", k) for k in named], "setting", "shoal envs NAME lists all of an env")
        changed[key] = _like(name, named[key], convert(name, value, _kind_of(named[key])))
    return defaults._replace(**changed)


def to_toml_tables(settings: Settings) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Tables for `config.toml`, which `--config` reads back, and the origin of each `table.key`."""
    tables = {"train": asdict(settings.train), group_of(settings.train.algo): settings.algo}
    if settings.env:
        tables["env"] = settings.env
    origins = {
        f"{table}.{key}": settings.origins[_dotted(table, key)] for table in tables for key in tables[table]
    }
    return tables, origins


# --- Algorithms -------------------------------------------------------------------------------


def group_of(algo: str) -> str:
    """The prefix of an algorithm's settings: `ppo`, also for `my_package.ppo`."""
    return re.split(r"[.:]", algo)[-1]


def algo_kinds(module: Any) -> dict[str, Any]:
    """Type of every setting of an algorithm, knobs first."""
    return {**typing.get_type_hints(module.Knobs), **typing.get_type_hints(module.Sizes)}


def algo_defaults(module: Any) -> dict[str, Any]:
    return {**module.Knobs()._asdict(), **asdict(module.Sizes())}


def split_algo(module: Any, values: Mapping[str, Any], group: str = "") -> tuple[Any, Any]:
    """The algorithm's (Knobs, Sizes) from its settings by name; ShoalError for a knob outside its range.

    An algorithm may give `RANGES`: knob → (low, high), both included.
    """
    for name, (low, high) in getattr(module, "RANGES", {}).items():
        _within(low, high, f"{group or group_of(module.__name__)}.{name}", values[name])
    knobs = module.Knobs(**{name: values[name] for name in module.Knobs._fields})
    sizes = module.Sizes(**{f.name: values[f.name] for f in fields(module.Sizes)})
    return knobs, sizes


# --- Values -----------------------------------------------------------------------------------

NO_VALUE = ("none", "None", "")
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def convert(name: str, value: Any, kind: Any) -> Any:
    """`value`, text or not, as `kind`; a ShoalError says what `name` should have been."""
    try:
        return _convert(value, kind)
    except (ValueError, TypeError, IndexError, OverflowError):
        raise ShoalError(f"{name} = {value!r} is not {describe_kind(kind)}") from None


def describe_kind(kind: Any) -> str:
    """A type in words, for messages and listings."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if arg is type(None) else describe_kind(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is tuple:
        return "whole numbers such as 64,64" if args[0] is int else "a list of words"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return "a time such as 90s, 10m or 2h" if kind is Duration else words[kind]


def show_value(value: Any) -> str:
    """A value as it may be typed on the command line."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _convert(value: Any, kind: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None or value in NO_VALUE:
            return None
        (kind,) = (arg for arg in args if arg is not type(None))
        return _convert(value, kind)
    if origin is Literal:
        if value not in args:
            raise ValueError
        return value
    if origin is tuple and args[0] is str:
        return tuple(_convert(part, str) for part in ((value,) if isinstance(value, str) else value))
    if origin is tuple:
        parts = value.strip("()[] ").split(",") if isinstance(value, str) else value
        parts = parts if isinstance(parts, list | tuple) else [parts]
        return tuple(_convert(part, args[0]) for part in parts if part != "")
    if kind is Duration:
        number, unit = re.findall(r"^\s*([0-9.]+)\s*([smhd]?)\s*$", str(value))[0]
        return float(number) * UNITS[unit]
    if kind is bool and not isinstance(value, bool):
        if str(value).lower() not in WORDS:
            raise ValueError
        return WORDS[str(value).lower()]
    if kind is str or kind is bool:
        if not isinstance(value, kind):
            raise TypeError
        return value
    if isinstance(value, bool):
        raise TypeError
    number = (
        int(value) if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[\d_]+\s*", value) else float(value)
    )
    if number != (int(number) if kind is int else number):  # a fraction, or NaN
        raise ValueError
    return kind(number)


def _guess(value: Any) -> Any:
    """Text as the plainest value it can be; an env's types are known only once it is loaded."""
    for kind in (int, float, bool) if isinstance(value, str) else ():
        try:
            return _convert(value, kind)
        except (ValueError, OverflowError):
            continue
    return value


def _kind_of(value: Any) -> type:
    """The Python type of a param's default, which may be a number or an array scalar."""
    kinds = {"b": bool, "i": int, "u": int, "f": float}
    return kinds[value.dtype.kind] if hasattr(value, "dtype") else type(value)


def _like(name: str, default: Any, value: Any) -> Any:
    """`value` with the dtype of `default`: a Python number among arrays would compile anew."""
    largest = LARGEST if isinstance(value, float) else INT32
    if isinstance(value, int | float) and math.isfinite(value) and abs(value) > largest:
        raise ShoalError(f"{flag(name)} {show_value(value)} is too large: at most {largest:g} fits 32 bits")
    return default.dtype.type(value) if hasattr(default, "dtype") else value


# --- Names ------------------------------------------------------------------------------------


def nearest(name: str, known: Iterable[str]) -> str:
    """ "did you mean X?", or nothing where no name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def flag(name: str) -> str:
    """A setting as a command-line option."""
    return "--for" if name == "for_s" else f"--{name}" if "." in name else "--" + name.replace("_", "-")


def comments(cls: Any) -> dict[str, str]:
    """The trailing comment of every field of a class, or parameter of a function: its help."""
    try:
        source = inspect.getsource(cls)
    except OSError:
        return {}
    return dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", source, re.MULTILINE))


VARIES = "differs between agents"  # the origin of a setting that is swept; its value is then of no agent


def _dotted(table: str, key: str) -> str:
    return key if table == "train" else f"{table}.{key}"


def _known(name: str, known: Iterable[str], noun: str, hint: str) -> None:
    known = list(known)
    if name not in known:
        near = nearest(name, known)
        raise ShoalError(f"there is no {noun} {name}", f"{near} {hint}".strip())


def _all_of(table: str) -> str:
    return "shoal train --help lists all" if table == "train" else f"shoal algos {table} lists all"


def _within(low: float, high: float, name: str, value: float | None) -> None:
    if value is not None and not low <= value <= high:
        most = f"{high:,}" if isinstance(high, int) else f"{high:g}"
        bounds = f"at least {low:g}" if value < low else f"from {low:g} to {most}"
        raise ShoalError(f"{flag(name)} {show_value(value)} must be {bounds}")


def _countable(train: TrainConfig, sizes: Any) -> None:
    """Updates, and the rows of one, are counted in int32 on the device."""
    rows = sizes.num_envs * sizes.num_steps
    if not 1 <= rows <= INT32:
        raise ShoalError(f"num_envs * num_steps = {rows:,} must be from 1 to {INT32:,}")
    if (updates := -(-train.steps // rows)) > INT32:
        raise ShoalError(
            f"--steps {train.steps:.3g} is {updates:.3g} updates of {rows:,} steps, more than {INT32:,}",
            f"use --steps {INT32 * rows} or fewer",
        )


def _read_file(path: Path) -> Tables:
    from shoal.runs.manifest import read_toml

    try:
        tables = read_toml(path)
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}", "--config takes a TOML file") from error
    for key, value in tables.items():
        if not isinstance(value, dict):
            raise ShoalError(
                f"{path}: {key} stands outside a table",
                "settings go under [train], the algorithm's under [ppo], the env's under [env]",
            )
    return tables
