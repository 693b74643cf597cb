"""Trained policies on disk and back: `policy/` holds safetensors and a JSON contract, never a pickle.

`policy.safetensors` has every array an agent acts with (weights, normaliser), led by the agents' axis and
named by its path in the Policy tree; `contract.json` says what goes in and comes out and how to rebuild it.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shoal.app import blame, catalogue
from shoal.app.config import algo_kinds, convert
from shoal.envs.spaces import describe, from_json, to_json, zeros
from shoal.errors import ShoalError
from shoal.mesh.devices import MATMUL_PRECISION
from shoal.nets import net_of
from shoal.nets.check import checked
from shoal.rollout.device import choose, draw, spread
from shoal.runs.folder import open_run, parts, places
from shoal.runs.manifest import read_object, reading, write_json
from shoal.types import Agent, Space, Tree, is_space

FORMAT = 1
Which = str | int | Sequence[int]
WEIGHTS, CONTRACT = "policy.safetensors", "contract.json"
KEYS = (
    *("env", "env_params", "time_limit", "algo", "net", "sizes"),
    *("agents", "returns", "obs_space", "action_space"),
)


def make_agent(algo: str, sizes: Any, net: str, obs_space: Space, action_space: Space) -> Agent:
    """The Agent that a run's settings describe; `net` is a name of the house's or module:make."""
    own = ":" in net
    maker = checked(catalogue.load_net(net), net, blame.describe) if own else net_of(net, sizes)
    return catalogue.load_algo(algo).make(obs_space, action_space, sizes, maker)


def write_policy(folder: Path, agent: Agent, learners: Tree, contract: dict[str, Any]) -> None:
    """Write the policies of a whole population; `learners` leaves are led by P.

    `contract` brings algo, sizes, net, env, agents (ids), returns, obs_space and action_space.
    """
    policy = jax.device_get(jax.vmap(agent.policy)(learners))
    arrays = {path: np.ascontiguousarray(leaf) for path, leaf in _named(policy)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / WEIGHTS)
    spaces = {name: contract[name] for name in ("obs_space", "action_space")}
    write_json(
        folder / CONTRACT,
        {"format": FORMAT, **contract}
        | {name: to_json(space) for name, space in spaces.items()}
        | {"arrays": _shapes(arrays)},
    )


class Policy:
    """Trained agents that act: one, or a whole population served as one program."""

    def __init__(self, agent: Agent, policy: Tree, contract: dict[str, Any], single: bool):
        self.contract = contract
        self.agents: tuple[int, ...] = tuple(contract["agents"])
        self.returns: tuple[float | None, ...] = tuple(contract["returns"])  # None: no episode, or NaN
        self.obs_space: Space = from_json(contract["obs_space"])
        self.action_space: Space = from_json(contract["action_space"])
        self.agent = agent
        self.params = policy  # leaves are led by agents
        self._single = single

        def step(policy, carry, obs, mask, key):
            def one(policy, carry, obs, mask, key):
                rows = jax.tree.leaves(obs)[0].shape[0]
                noise = None if key is None else draw(agent, jax.random.split(key, rows))
                return agent.act(policy, carry, obs, mask, noise)[:2]

            with jax.default_matmul_precision(MATMUL_PRECISION):
                return jax.vmap(one)(policy, carry, obs, mask, key)

        def act(policy, obs, mask, key):
            carry = spread(spread(agent.carry(), jax.tree.leaves(obs)[0].shape[1]), len(self.agents))
            return step(policy, carry, obs, mask, key)[1]

        self.raw = act  # (params, obs [P, B, …], mask, keys [P] or None) -> actions; not yet compiled
        self._act = jax.jit(act)
        self._step = jax.jit(step)

    def act(self, obs: Tree, mask: Tree = None, key: jax.Array | None = None) -> Tree:
        """Actions for observations: the most likely ones, or drawn with `key` (jax.random.key).

        One agent takes obs as the env gives it, or with a batch axis in front; a population takes
        [P, B, …]. `mask` has the same leading axes. NumPy (or lists) in, NumPy out, as simulators want it;
        jax arrays in, jax arrays out. ShoalError where a shape does not fit the contract.
        """
        if self.remembers:
            raise ShoalError(
                f"a policy of {self.contract['algo']} remembers; one observation is not enough for it",
                "use carry, action = policy.step(carry, obs), with carry = None at the start of an episode",
            )
        run = lambda obs, mask, keys: ((), self._act(self.params, obs, mask, keys))
        return self._run(run, obs, mask, key)[1]

    def step(
        self, carry: Tree, obs: Tree, mask: Tree = None, key: jax.Array | None = None, fresh: Any = None
    ) -> tuple[Tree, Tree]:
        """As `act`, for policies with memory: (what is remembered, actions), to be handed back next time.

        `carry` None: every episode starts now. `fresh`, bool with the leading axes of obs: those that do.
        """

        def run(obs, mask, keys):
            rows = jax.tree.leaves(obs)[0].shape[:2]
            start = spread(spread(self.agent.carry(), rows[1]), rows[0])
            before = start if carry is None else carry
            if fresh is not None:
                before = choose(jnp.asarray(fresh, bool).reshape(rows), start, before)
            return self._step(self.params, before, obs, mask, keys)

        return self._run(run, obs, mask, key)

    @cached_property
    def remembers(self) -> bool:
        """Whether even the greedy action depends on earlier observations."""
        changed: list[bool] = []

        def trace(policy, carry, obs):
            after, *_ = self.agent.act(policy, carry, obs, None, None)
            changed.extend(a is not b for a, b in zip(*map(jax.tree.leaves, (carry, after))))

        one = jax.tree.map(lambda x: x[0], self.params)
        jax.eval_shape(trace, one, spread(self.agent.carry(), 1), spread(zeros(self.obs_space), 1))
        return any(changed)

    def _run(self, run: Callable, obs: Tree, mask: Tree, key: jax.Array | None) -> tuple[Tree, Tree]:
        """What `run` makes of obs [P, B, …]: (carry, actions), the actions shaped and typed as obs was."""
        back = not any(isinstance(x, jax.Array) for x in jax.tree.leaves(obs))
        if back:
            like = lambda space, x: np.asarray(x, space.dtype)
            try:
                obs = jax.tree.map(like, self.obs_space, obs, is_leaf=is_space)
            except (ValueError, TypeError) as error:
                raise ShoalError(f"obs does not fit {describe(self.obs_space)}: {error}") from error
        lead = self._leading(obs)
        if 0 in (rows := jax.tree.leaves(obs)[0].shape[:lead]):  # no envs, no actions
            none = lambda space: (np if back else jnp).zeros((*rows, *space.shape), space.dtype)
            return (), jax.tree.map(none, self.action_space, is_leaf=is_space)
        if self._single:
            add = (None,) if lead == 1 else (None, None)
            lead_with = lambda x: (x if isinstance(x, jax.Array) else np.asarray(x))[add]
            obs, mask = jax.tree.map(lead_with, (obs, mask))
        keys = None if key is None else jax.random.split(key, len(self.agents))
        carry, action = run(obs, mask, keys)
        if back:
            action = jax.tree.map(np.asarray, action)
        return carry, jax.tree.map(lambda x: x[(0,) * (2 - lead)], action) if self._single else action

    def _leading(self, obs: Tree) -> int:
        """How many axes lead the observation's own."""
        spaces = jax.tree.leaves(self.obs_space, is_leaf=is_space)
        leaves = jax.tree.leaves(obs)
        allowed = (0, 1) if self._single else (2,)
        if len(leaves) == len(spaces):
            for lead in allowed:
                fits = all(x.shape[lead:] == s.shape and x.ndim >= lead for x, s in zip(leaves, spaces))
                if fits and (self._single or leaves[0].shape[0] == len(self.agents)):
                    return lead
        expected = "[…] or [B, …]" if self._single else f"[{len(self.agents)}, B, …]"
        raise ShoalError(
            f"obs has shape {[x.shape for x in leaves]}; this policy takes {expected} of "
            f"{describe(self.obs_space)}",
            "" if self._single else "for one agent: shoal.load(path)",
        )

    def __repr__(self) -> str:
        return f"Policy({self.contract['env']}, agents={list(self.agents)}, obs={describe(self.obs_space)})"


def load(path: str | Path, agents: Which = "best", root: str | Path = "runs") -> Policy:
    """The policy of a run or of an exported folder.

    `agents`: `best`, `median` or `worst` by evaluation return, an agent's id, `all`, or a list of ids. One
    agent acts on obs as the env gives it; `all` and lists are a population, [P, B, …]. A sweep over shapes
    has a population in each of its programs, and itself only a `best`.
    """
    folder = folder_of(path, root, agents)
    contract = _contract(folder)
    chosen = choose_agents(contract["returns"], contract["agents"], agents)
    agent, like = _rebuilt(folder / CONTRACT, contract)
    arrays = _arrays(folder / WEIGHTS)
    leaves = []
    for name, leaf in _named(like):
        wanted = leaf.dtype, (len(contract["agents"]), *leaf.shape)
        found = (arrays[name].dtype, arrays[name].shape) if name in arrays else None
        if found != wanted:
            shown = f"{found[0]} {list(found[1])}" if found else "nothing"
            raise ShoalError(
                f"{folder / WEIGHTS}: {name} should be {wanted[0]} {list(wanted[1])}, but there is {shown}",
                "the file is damaged, or the network has changed since; use the code it was written with",
            )
        leaves.append(jnp.asarray(arrays[name][chosen]))
    policy = jax.tree.unflatten(jax.tree.structure(like), leaves)
    kept = {name: [contract[name][i] for i in chosen] for name in ("agents", "returns")}
    return Policy(agent, policy, contract | kept, single=not _several(agents) and agents != "all")


def read_arrays(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The contract of a policy folder, and its arrays by path, led by agents."""
    return _contract(folder), _arrays(folder / WEIGHTS)


def choose_agents(returns: Sequence[float | None], ids: list[int], which: Which) -> list[int]:
    """Places of the agents that `which` means: best, median, worst, all, an id, or several of these."""
    if not isinstance(which, str) and _several(which) and len(which):
        return [place for one in which for place in choose_agents(returns, ids, one)]
    if which == "all":
        return list(range(len(ids)))
    scores = np.asarray([np.nan if x is None else x for x in returns], float)
    order = np.argsort(np.where(np.isnan(scores), -np.inf, scores), kind="stable")
    named = {"best": order[-1], "median": order[len(order) // 2], "worst": order[0]}
    if isinstance(which, str) and which in named:
        return [int(named[which])]
    try:
        return [ids.index(int(which) if isinstance(which, str) else operator.index(which))]  # type: ignore[arg-type]
    except (ValueError, TypeError):
        row = ids == list(range(ids[0], ids[0] + len(ids)))
        known = f"from {ids[0]} to {ids[-1]}" if row else f"of {', '.join(map(str, sorted(ids)))}"
        raise ShoalError(
            f"there is no agent {which!r}", f"use best, median, worst, or an id {known}"
        ) from None


def write_subset(source: Path, out: Path, agents: Which) -> None:
    """Copy only some agents of a policy folder to the folder `out`."""
    contract = _contract(source)
    chosen = choose_agents(contract["returns"], contract["agents"], agents)
    arrays = {path: np.ascontiguousarray(x[chosen]) for path, x in _arrays(source / WEIGHTS).items()}
    kept = {name: [contract[name][i] for i in chosen] for name in ("agents", "returns")}
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_file(arrays, out / WEIGHTS)
        write_json(out / CONTRACT, contract | kept | {"arrays": _shapes(arrays)})
    except (OSError, SafetensorError) as error:
        raise ShoalError(f"Cannot write a policy to {out}: {error}", "choose another folder") from error


def folder_of(path: str | Path, root: str | Path = "runs", agents: Which = "best") -> Path:
    """Where the policy of a run, or of an exported folder, lies; ShoalError where there is none.

    Of a sweep over shapes, it is that of the program with the best agent.
    """
    for place in places(path, root):
        for folder in (place, place / "policy"):
            if (folder / CONTRACT).is_file():
                return folder
    run = open_run(path, root)
    found = [part.policy for part in parts(run) if (part.policy / CONTRACT).is_file()]
    if not found:
        raise ShoalError(
            f"{run.path} has no policy yet", f"the run has not finished: shoal resume {run.path}"
        )
    if not (isinstance(agents, str) and agents == "best"):
        raise ShoalError(
            f"{run.path} is a sweep of several programs, each with agents of its own numbers",
            f"name one of them, such as {found[0].parent}",
        )
    return max(found, key=_best_return)


def _best_return(folder: Path) -> float:
    contract = _contract(folder)
    best = choose_agents(contract["returns"], contract["agents"], "best")[0]
    return -math.inf if (value := contract["returns"][best]) is None else value


def _contract(folder: Path) -> dict[str, Any]:
    path = folder / CONTRACT
    contract = read_object(path, "format")
    if contract["format"] != FORMAT:
        raise ShoalError(
            f"{folder} is a policy of format {contract['format']}, this Shoal reads {FORMAT}",
            "load it with the Shoal version named in its contract, and export it again",
        )
    contract = read_object(path, *KEYS)
    with reading(path):
        ids, returns = contract["agents"], contract["returns"]
        numbers = all(isinstance(x, int | float | None) for x in [*ids, *returns])
        if not ids or len(ids) != len(returns) or not numbers:
            raise ValueError("agents and returns should be numbers, and as many")
    return contract


def _rebuilt(path: Path, contract: dict[str, Any]) -> tuple[Agent, Tree]:
    """The Agent that a contract describes, and its Policy as shapes."""
    with reading(path):
        spaces = from_json(contract["obs_space"]), from_json(contract["action_space"])
        module = catalogue.load_algo(contract["algo"])
        if odd := {field.name for field in fields(module.Sizes)} ^ set(contract["sizes"]):
            raise ValueError(f"sizes differ from those of {contract['algo']} in {', '.join(sorted(odd))}")
        kinds = algo_kinds(module)
        given = contract["sizes"].items()
        sizes = {name: convert(f"{path}: sizes.{name}", value, kinds[name]) for name, value in given}
    agent = make_agent(contract["algo"], module.Sizes(**sizes), str(contract["net"]), *spaces)
    return agent, jax.eval_shape(lambda: agent.policy(agent.init(jax.random.key(0), module.Knobs())))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with reading(path):
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(error) from error


def _several(which: Any) -> TypeGuard[Sequence]:
    return isinstance(which, Sequence | np.ndarray) and not isinstance(which, str)


def _named(tree: Tree) -> list[tuple[str, Any]]:
    """Leaves with their path as one string, such as actor/0/weight."""
    rows = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in rows]


def _shapes(arrays: dict[str, np.ndarray]) -> dict[str, list]:
    return {path: [str(leaf.dtype), list(leaf.shape)] for path, leaf in arrays.items()}
