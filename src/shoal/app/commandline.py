"""From words on the command line to typed values: tyro splits and documents, `config` converts and checks.

A verb's options are the parameters of its function, and `train`'s are the fields of its configs; what either
says in a trailing comment is its help.
"""

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, NamedTuple, TypedDict

from shoal.app import config
from shoal.app.config import OutputConfig, Settings, TrainConfig, convert, flag, nearest
from shoal.errors import ShoalError

DOTTED = re.compile(r"--([A-Za-z_]\w*)\.([\w-]+)(?:=(.*))?", re.DOTALL)
REPEATED = {"sweep": "ppo.lr=log:1e-4..1e-2", "cross": "ppo.num_envs=4,64"}  # with an example of each
REQUIRED = inspect.Parameter.empty
MORE = """Settings of the algorithm and of the env go by their names,
--ppo.lr 3e-4 and --env.gravity 9.8; shoal algos ppo and shoal envs cartpole
list them. A file given by --config has tables train, ppo and env. Flags win
over the file, and the file over the preset of the env."""


class Option(NamedTuple):
    kind: Any
    default: Any
    comment: str
    positional: bool = False


def read_train(words: Sequence[str]) -> tuple[Settings, OutputConfig]:
    """The settings and output options of `shoal train …`."""
    what = "Train many agents on one env, in one program."
    settings, output = read_settings(words, "shoal train", what, _fields_of(OutputConfig))
    return settings, OutputConfig(**output)


def read_settings(
    words: Sequence[str], prog: str, description: str, own: dict[str, Option]
) -> tuple[Settings, dict[str, Any]]:
    """The settings of a training, as every verb that is about one takes them, and its `own` options given."""
    words, dotted = split_dotted(words)
    options = {"config": Option(str | None, None, "settings from this TOML file")}
    options |= _fields_of(TrainConfig) | own
    options["env"] = options["env"]._replace(positional=True)
    repeated = {}
    for name in REPEATED.keys() & options.keys():
        words, repeated[name] = _split_repeated(words, name)
    given = read(options, words, prog, f"{description}\n\n{MORE}")
    given |= {name: tuple(taken) for name, taken in repeated.items() if taken}
    file = given.pop("config", None)
    rest = {name: given.pop(name) for name in own if name in given}
    return config.resolve(given, dotted, file), rest


def call(function: Callable[..., Any], words: Sequence[str], prog: str) -> Any:
    """Call a verb with arguments read from `words`; positional-only parameters need no option name.

    A verb whose first parameter is `Settings` takes all of `train`'s settings besides its own options.
    """
    kinds, comments = typing.get_type_hints(function), config.comments(function)
    parameters = inspect.signature(function).parameters
    options = {
        name: Option(kinds[name], p.default, comments.get(name, ""), p.kind is p.POSITIONAL_ONLY)
        for name, p in parameters.items()
        if kinds[name] is not Settings
    }
    about = inspect.getdoc(function) or ""
    if len(options) < len(parameters):
        settings, own = read_settings(words, prog, about, options)
        return function(settings, **own)
    given = read(options, words, prog, about)
    for name, option in options.items():
        if option.default is REQUIRED and name not in given:
            raise ShoalError(f"{prog} needs {name.upper()}", f"{prog} --help")
    leading = [given.pop(name, option.default) for name, option in options.items() if option.positional]
    return function(*leading, **given)


def split_dotted(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Take `--group.key value` and `--group.key=value` out; a switch without a value means true."""
    rest: list[str] = []
    dotted: dict[str, dict[str, Any]] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not (match := DOTTED.fullmatch(word)):
            rest.append(word)
            continue
        group, key, value = match.groups()
        if value is None:
            value = queue.pop(0) if queue and not queue[0].startswith("--") else "true"
        dotted.setdefault(group, {})[key.replace("-", "_")] = value
    return rest, dotted


def _split_repeated(words: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Take every `--name SETTING=VALUES` out: it may be given several times."""
    rest: list[str] = []
    taken: list[str] = []
    queue = list(words)
    while queue:
        word, equals, value = (first := queue.pop(0)).partition("=")
        if word != f"--{name}":
            rest.append(first)
        elif equals or (queue and not queue[0].startswith("--")):
            taken.append(value if equals else queue.pop(0))
        else:
            raise ShoalError(f"--{name} names no values", f"for example --{name} {REPEATED[name]}")
    return rest, taken


def read(options: Mapping[str, Option], words: Sequence[str], prog: str, description: str) -> dict[str, Any]:
    """The options that were given, typed; what was not given is left out, so that its origin is known."""
    import tyro

    typed_dict: Any = TypedDict
    shape = typed_dict("options", {n: _for_tyro(n, option) for n, option in options.items()}, total=False)
    given, unknown = tyro.cli(
        shape, args=list(words), prog=prog, description=description, return_unknown_args=True
    )
    if unknown:
        raise _refusal(unknown, options, prog)
    return {name: convert(flag(name), value, options[name].kind) for name, value in given.items()}


def _fields_of(cls: Any) -> dict[str, Option]:
    kinds, comments = typing.get_type_hints(cls), config.comments(cls)
    return {f.name: Option(kinds[f.name], f.default, comments.get(f.name, "")) for f in fields(cls)}


def _for_tyro(name: str, option: Option) -> Any:
    """A switch, or text whatever the type: `config.convert` reads it as it reads files and keywords."""
    import tyro

    arg: Any = tyro.conf.arg  # types made at run time, which type checkers do not follow
    positional: Any = tyro.conf.Positional
    shown = "required" if option.default is REQUIRED else f"default: {config.show_value(option.default)}"
    word = name.upper() if option.positional else _metavar(option.kind)
    about = dict(name=flag(name)[2:], help=option.comment, help_behavior_hint=f"({shown})")
    if option.kind is bool:
        return Annotated[bool, arg(**about)]
    text: Any = Annotated[str, arg(**about, metavar=word)]
    return positional[text] if option.positional else text


def _metavar(kind: Any) -> str:
    if choices := typing.get_args(kind):
        kind = next(choice for choice in choices if choice is not type(None))
        if isinstance(kind, str):
            return "|".join(choices)
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "TIME")


def _group_with(key: str) -> str:
    """The algorithm that has a setting of this name, if one has."""
    from shoal.app import catalogue

    for name in catalogue.ALGOS:
        if key in config.algo_kinds(catalogue.load_algo(name)):
            return name
    return ""


def _refusal(unknown: Sequence[str], options: Mapping[str, Option], prog: str) -> ShoalError:
    """An error about words that mean nothing, naming the option that was likely meant."""
    word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
    if not word.startswith("-"):
        return ShoalError(f"{prog} has no place for {word!r}", f"{prog} --help lists all")
    near = nearest(word, [flag(name) for name, option in options.items() if not option.positional])
    if "algo" in options and (group := _group_with(word[2:].replace("-", "_"))):
        near = f"did you mean --{group}.{word[2:].replace('-', '_')}?"
    elif hasattr(TrainConfig, word[2:].replace("-", "_")) and prog == "shoal resume":
        return ShoalError(f"{prog} cannot change {word}: it is part of what the run is", f"{prog} --help")
    return ShoalError(f"{prog} has no option {word}", f"{near} {prog} --help lists all".strip())
