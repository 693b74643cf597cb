"""Parameters by path: taken over from another run (`--init-from`), or held as they are (`--freeze`).

A path is that of `learner.params`, dotted: `actor.0` is PPO's first layer, `0.weight` a weight of DQN's. What
is no parameter but must fit them follows by itself: running statistics are taken over as well, and what an
algorithm begins as a copy of its parameters (target networks) begins as a copy of the new ones.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.algos.update import freeze, statistics
from shoal.app import policies
from shoal.app.config import group_of
from shoal.errors import ShoalError
from shoal.runs import checkpoints, manifest
from shoal.runs.folder import RunFolder, open_run, parts
from shoal.runs.metrics import last_rows
from shoal.types import Agent, Tree

SPEC = re.compile(r"(?P<run>.+?)(@(?P<agents>\w+))?(:(?P<parts>[\w.,\-]+))?")
PARAMS = "params."
SHOWN = 12  # paths, in a message

Shape = tuple[str, tuple[int, ...]]  # dtype and shape


class Source(NamedTuple):
    """Arrays of trained agents, by the path that each has in a Learner or in a Policy."""

    name: str
    shapes: dict[str, Shape]  # of one agent
    agents: list[int]
    returns: list[float | None]
    read: Callable[[Iterable[str]], dict[str, np.ndarray]]  # paths → arrays led by agents
    acting: bool  # an exported policy, without what only learning needs


class Inheritance(NamedTuple):
    """What a run takes over, and from whom."""

    source: Source
    taken: dict[str, str]  # path in the learner → path in the source
    copies: dict[str, str]  # path in the learner → path of the parameter it begins as a copy of
    chosen: list[int]  # agents of the source, by place; agent i begins as the i-th, over and over
    notes: tuple[str, ...]

    def __call__(self, learner: Any, agents: np.ndarray) -> Any:
        """A fresh learner, leaves led by lanes, with what is taken over; `agents` has each lane's number."""
        arrays = self.source.read(set(self.taken.values()))
        who = np.asarray(self.chosen)[agents % len(self.chosen)]

        def changed(path: str, leaf: jax.Array) -> jax.Array:
            path = self.copies.get(path, path)
            return (
                jax.device_put(arrays[self.taken[path]][who], leaf.sharding) if path in self.taken else leaf
            )

        leaves = [changed(path, leaf) for path, leaf in named(learner)]
        return jax.tree.unflatten(jax.tree.structure(learner), leaves)


def named(tree: Tree) -> list[tuple[str, Any]]:
    """Leaves with their path, such as params.actor.0.weight."""
    rows = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in rows]


# --- Frozen -----------------------------------------------------------------------------------


def held(agent: Agent, learner: Any, spec: str | None) -> Agent:
    """The agent with the parameters that `spec` names frozen; `learner` has its shapes."""
    if not spec:
        return agent
    paths = [path for path, _ in named(learner.params)]
    still = within(f"--freeze {spec}", spec, paths)
    frozen = [path in still for path in paths]
    return freeze(agent, jax.tree.unflatten(jax.tree.structure(learner.params), frozen))


def within(what: str, spec: str, paths: list[str]) -> set[str]:
    """The paths at or below one of those that `spec` lists; ShoalError for one that is nowhere."""
    found: set[str] = set()
    for part in filter(None, (part.strip() for part in spec.split(","))):
        below = {path for path in paths if path == part or path.startswith(f"{part}.")}
        if not below:
            raise ShoalError(f"{what}: there is no parameter {part}", f"there are {_listed(paths)}")
        found |= below
    return found


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:SHOWN]) + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")


# --- Taken over -------------------------------------------------------------------------------


def inheritance(
    agent: Agent, knobs: Tree, learner: Any, algo: str, spec: str, root: str | Path
) -> Inheritance:
    """What a run takes over by `--init-from SPEC`; ShoalError where it does not fit.

    SPEC is RUN or the folder of a policy, then @ and who of it (best, median, worst, an agent's number, or
    all: each from the one of its own number), then : and parts. Nothing but shapes is read yet.
    """
    match = SPEC.fullmatch(spec)
    if not match:
        raise ShoalError(f"--init-from {spec} cannot be read", "write RUN, RUN@all or RUN:actor.0,actor.1")
    source = _source(match["run"], root, match["agents"] or "best")
    chosen = policies.choose_agents(source.returns, source.agents, match["agents"] or "best")
    what = f"--init-from {spec}"
    wanted = {path: (str(x.dtype), tuple(x.shape)) for path, x in named(learner)}
    places = _handed_on(agent, learner) if source.acting else {path: path for path in wanted}
    moments = tuple(f"{name}." for name in statistics(learner))
    own = {path: at for path, at in places.items() if path.startswith(PARAMS)}
    notes: tuple[str, ...] = ()
    if match["parts"]:
        chosen_paths = within(what, match["parts"], [path.removeprefix(PARAMS) for path in own])
        own = {path: at for path, at in own.items() if path.removeprefix(PARAMS) in chosen_paths}
    elif left := [path for path in wanted if path.startswith(PARAMS) and path not in own]:
        notes = (f"an exported policy has no {_listed(_layers(left))}: these begin afresh",)
    _check(what, own, wanted, source)
    seen = {path: at for path, at in places.items() if path.startswith(moments)}
    odd = _unlike(seen, wanted, moments, source)
    if odd and not match["parts"]:
        hint = f"both or neither normalise observations: --{group_of(algo)}.normalize_obs true or false"
        raise ShoalError(f"{what}: running statistics differ: {odd}", hint)
    if odd:
        notes = (f"running statistics are not taken over from {source.name}: {odd}",)
    taken = own | ({} if odd else seen)
    return Inheritance(source, taken, _copies(agent, knobs), chosen, notes)


def _layers(paths: Iterable[str]) -> list[str]:
    """The first word of each path of a parameter, once."""
    return list(dict.fromkeys(path.removeprefix(PARAMS).split(".")[0] for path in paths))


def _check(what: str, paths: Mapping[str, str], wanted: Mapping[str, Shape], source: Source) -> None:
    for path, at in paths.items():
        if source.shapes.get(at) != wanted[path]:
            there = [name.removeprefix(PARAMS) for name in source.shapes if name.startswith(PARAMS)]
            raise ShoalError(
                f"{what}: {path.removeprefix(PARAMS)} should be {_shown(wanted[path])}, "
                f"but there is {_shown(source.shapes.get(at))}",
                f"{source.name} has {_listed(there or list(source.shapes))}; take only what fits: RUN:PARTS",
            )


def _unlike(
    seen: Mapping[str, str], wanted: Mapping[str, Shape], moments: tuple[str, ...], source: Source
) -> str:
    """How the source's running statistics differ from those wanted; nothing where they do not."""
    for path, at in seen.items():
        if source.shapes.get(at) != wanted[path]:
            return f"{path} should be {_shown(wanted[path])}, but there is {_shown(source.shapes.get(at))}"
    more = [at for at in source.shapes if moments and at.startswith(moments) and at not in seen.values()]
    return f"{source.name} has {more[0]} besides" if more else ""


def _shown(shape: Shape | None) -> str:
    return f"{shape[0]} {list(shape[1])}" if shape else "nothing"


def _handed_on(agent: Agent, learner: Any) -> dict[str, str]:
    """Path in the learner → path in its policy, of every leaf that acting uses as it was learned."""
    found: dict[str, str] = {}

    def trace(learner: Any) -> Any:
        policy = agent.policy(learner)
        at = {id(leaf): path for path, leaf in named(policy)}
        found.update({path: at[id(leaf)] for path, leaf in named(learner) if id(leaf) in at})
        return policy

    jax.eval_shape(trace, learner)
    return found


def _copies(agent: Agent, knobs: Tree) -> dict[str, str]:
    """Path of every leaf of a fresh learner that is one of its parameters once more → path of that."""
    found: dict[str, str] = {}

    def trace(key: Any) -> Any:
        learner = agent.init(key, knobs)
        own = {id(leaf): f"{PARAMS}{path}" for path, leaf in named(learner.params)}
        rest = learner._replace(params=())
        found.update({path: own[id(leaf)] for path, leaf in named(rest) if id(leaf) in own})
        return learner

    jax.eval_shape(trace, jax.random.key(0))
    return found


# --- Sources ----------------------------------------------------------------------------------


def _source(spec: str, root: str | Path, agents: str) -> Source:
    """A run's newest checkpoint, or else its policy, or an exported one."""
    try:
        run = open_run(spec, root)
    except ShoalError:
        return _of_policy(spec, root, agents)
    if parts(run):  # a sweep over shapes: the program with the best agent
        run = RunFolder(policies.folder_of(spec, root, agents).parent)
    return _of_run(run) if checkpoints.steps(run.checkpoints) else _of_policy(spec, root, agents)


def _of_policy(spec: str, root: str | Path, agents: str) -> Source:
    folder = policies.folder_of(spec, root, agents)
    contract, arrays = policies.read_arrays(folder)
    dotted = {path.replace("/", "."): array for path, array in arrays.items()}
    shapes = {path: (str(array.dtype), array.shape[1:]) for path, array in dotted.items()}
    read = lambda paths: {path: dotted[path] for path in paths}
    return Source(str(folder), shapes, contract["agents"], contract["returns"], read, acting=True)


def _of_run(run: RunFolder) -> Source:
    step, leaves = checkpoints.leaves(run.checkpoints)
    # a checkpoint has .learner.params.actor[0].weight, or ['name'] where a layer is named
    own = {path: leaf for path, leaf in leaves.items() if path.startswith(".learner.")}
    dotted = {re.sub(r"\['?([^\]']*)'?\]", r".\1", path).removeprefix(".learner."): path for path in own}
    shapes = {path: (own[at][0], own[at][1][1:]) for path, at in dotted.items()}
    numbers = ".identity.agent"
    agents = checkpoints.read(run.checkpoints, step, [numbers])[numbers].tolist()
    scores = _scores(run)

    def read(paths: Iterable[str]) -> dict[str, np.ndarray]:
        found = checkpoints.read(run.checkpoints, step, [dotted[path] for path in paths])
        return {path: found[dotted[path]] for path in paths}

    return Source(str(run.path), shapes, agents, [scores.get(agent) for agent in agents], read, acting=False)


def _scores(run: RunFolder) -> dict[int, float | None]:
    """Each agent's return: that of the evaluation the run ended with, or else of its newest episodes."""
    result = manifest.read_object(run.manifest).get("result")
    if result:
        with manifest.reading(run.manifest):
            return dict(zip(result["agent_ids"], result["returns"], strict=True))
    return {row["agent"]: row.get("return_mean") for row in last_rows(run.metrics)}
