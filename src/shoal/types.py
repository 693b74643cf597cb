"""The contracts every room speaks: Env, Space, Step, Batch, Agent. Read this page first.

An environment and an agent are small tuples of pure functions; everything that flows between
them is a NamedTuple of arrays. Axis letters used in comments throughout:

    P agents   B envs per agent   T steps   A actions   D devices   M minibatches   n rows
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

Array = jax.Array
Key = jax.Array  # a typed PRNG key, as made by jax.random.key
Tree = Any  # a pytree of arrays
Params = Any  # a pytree of arrays: an env's parameters, a network's weights


# --- Spaces -----------------------------------------------------------------------------------


def _as_bound(bound: Any) -> Any:
    """Nested tuples instead of arrays, so that a space can be compared and hashed."""
    return np.asarray(bound).tolist() if np.ndim(bound) == 0 else tuple(map(_as_bound, np.asarray(bound)))


@dataclass(frozen=True)
class Box:
    """Arrays of `shape` and `dtype` with `low <= x <= high`; bounds broadcast against the shape."""

    low: Any
    high: Any
    shape: tuple[int, ...] = ()
    dtype: Any = np.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", _as_bound(self.low))
        object.__setattr__(self, "high", _as_bound(self.high))
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        np.broadcast_to(self.low, self.shape), np.broadcast_to(self.high, self.shape)  # or raise


@dataclass(frozen=True)
class Discrete:
    """Integers 0 … n - 1 (int32 scalars)."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int32)


@dataclass(frozen=True)
class MultiDiscrete:
    """Vectors of integers, entry i in 0 … nvec[i] - 1 (int32)."""

    nvec: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvec", tuple(int(n) for n in self.nvec))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int32)


Space = Any  # Box, Discrete, MultiDiscrete, or a pytree (dict, tuple) of them; spaces are leaves


def is_space(x: Any) -> bool:
    """Whether x is a leaf of a Space; for `jax.tree.map(…, is_leaf=is_space)`."""
    return isinstance(x, Box | Discrete | MultiDiscrete)


# --- Environments -----------------------------------------------------------------------------


class Step(NamedTuple):
    """What one env step returns. No auto-reset: `obs` is the true next observation, also at an end."""

    state: Tree
    obs: Tree
    reward: Array  # float32 []
    terminated: Array  # bool []: the task itself ended; nothing is worth anything after it
    truncated: Array  # bool []: cut short from outside; the future still has a value
    info: dict[str, Array]  # numeric extras, may be empty


class Env(NamedTuple):
    """A functional environment for ONE world; callers vmap. Any object with these attributes serves.

    `params` are the env's knobs: a NamedTuple of float32 or int32 scalars that may differ per agent
    and change without recompiling. Functions are pure: same key, same state, same action, same step.
    """

    name: str
    default_params: Callable[[], Params]
    reset: Callable[[Key, Params], tuple[Tree, Tree]]  # (key, params) -> (state, obs)
    step: Callable[[Key, Tree, Tree, Params], Step]  # (key, state, action, params) -> Step
    obs_space: Callable[[Params], Space]
    action_space: Callable[[Params], Space]
    time_limit: int = 0  # steps until Rollout truncates an episode; 0 = never
    action_mask: Callable[[Tree, Params], Tree] | None = None  # (state, params) -> bool, True = allowed
    render: Callable[[Tree, Params], Array] | None = None  # (state, params) -> uint8 [H, W, 3]


# --- Rollouts ---------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What a rollout yields for one agent: T steps of B envs, in the order they happened."""

    obs: Tree  # [T, B, …] what the action was chosen on
    mask: Tree  # [T, B, …] action mask at obs, or None
    action: Tree  # [T, B, …] what the env was given
    reward: Array  # [T, B]
    terminated: Array  # [T, B]
    truncated: Array  # [T, B] never set where terminated is
    final_obs: Tree  # [T, B, …] the true observation after the step, before any reset
    extras: Tree  # [T, B, …] what `act` noted (log_prob, …)
    carry: Tree  # [B, …] recurrent state before the first step; may be empty
    keys: Key  # [B] one key per env for this update's learning noise (replay sampling, …)
    key: Key  # [] the agent's key for this update's learning noise (shuffling)
    progress: Array  # [] share of the agent's update budget already spent, 0 … 1
    final_mask: Tree = None  # [T, B, …] action mask at final_obs, or None


# --- Agents -----------------------------------------------------------------------------------


class Axis(NamedTuple):
    """The data axis as an algorithm sees it: how to add up over its shares, and which share this is."""

    sum: Callable[[Tree], Tree]
    index: Array | int  # type: ignore[assignment]  # the field's name, not tuple.index
    size: int


WHOLE = Axis(sum=lambda tree: tree, index=0, size=1)  # one device holds all envs


class Outputs(NamedTuple):
    """What `grad` reports besides gradients."""

    metrics: dict[str, Array]  # sums over the rows, divided by the global count once
    samples: Tree = ()  # [n, …] per-row values such as new priorities


class Agent(NamedTuple):
    """One learner as pure functions over ONE agent (callers vmap): algorithm, network and sizes bound in.

    A Learner is a NamedTuple of arrays: params, optimiser, statistics, targets, `knobs`, and two fields
    whose leaves are led by B, the only ones sharded when an agent's envs are split over devices (`init`
    makes them for one env): `local` (statistics per env) and `replay` (past steps, written by `prepare`
    alone; () where there are none). Replay is large, so a masked lane's is written all the same, with the
    same values each time: what `prepare` writes, and where, must follow from the rest of the state alone.
    A Policy is the part that acting needs.
    """

    init: Callable[[Key, Tree], Tree]  # (key, knobs) -> Learner
    policy: Callable[[Tree], Tree]  # Learner -> Policy
    carry: Callable[[], Tree]  # () -> Carry of one env
    noise: Callable[[Key, int], Tree]  # (key, T) -> [T, …] every random draw one env's acting needs
    # (policy, carry [B], obs [B], mask [B], noise [B] or None = greedy) -> (carry, action [B], extras [B])
    act: Callable[[Tree, Tree, Tree, Tree, Tree], tuple[Tree, Tree, Tree]]
    # (learner, batch, axis) -> (learner, data, rows): targets and statistics of the global batch;
    # `data` is shared by all minibatches, `rows` [M, n, …] holds indices, weights, noise
    prepare: Callable[[Tree, Batch, Axis], tuple[Tree, Tree, Tree]]
    # (learner, data, rows_i) -> (numerator tree, count, outputs): sums, never means; draws nothing
    grad: Callable[[Tree, Tree, Tree], tuple[Tree, Array, Outputs]]
    apply: Callable[[Tree, Tree, Outputs], Tree]  # (learner, gradient, outputs) -> Learner


class Net(NamedTuple):
    """A network: any pair (init, apply) serves, from Equinox, flax, haiku or plain JAX."""

    init: Callable[[Key], Params]
    apply: Callable[[Params, Tree], Array]  # (params, obs [B, …]) -> float32 [B, outputs]
