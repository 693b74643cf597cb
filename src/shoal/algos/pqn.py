"""Parallelised Q-Network (Gallici et al. 2024, arXiv:2407.04811).

Q-learning on fresh rollouts of many envs (their algorithm 1), with neither replay nor target network: layer
normalisation keeps it stable, and Peng's Q(lambda) returns carry rewards back over several steps. RAdam (Liu
et al. 2020, arXiv:1908.03265) steps along a gradient clipped by its global norm. Targets are made once per
rollout, with the network that acted. Defaults are CleanRL's, but for twice its learning rate.
Differs: returns bootstrap through truncation from the true final observation, where both published codes take
any end for a termination; forbidden actions are neither taken nor bootstrapped from.
Left out: recurrent networks, and batch normalisation of the input.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shoal.envs.spaces import describe
from shoal.errors import LARGEST, ShoalError, check_counts
from shoal.nets import NetMaker, check_layers
from shoal.ops.advantages import lambda_returns
from shoal.ops.bootstrap import values
from shoal.ops.descent import descend
from shoal.ops.distributions import allowed
from shoal.ops.exploration import annealed, epsilon_greedy, exploration_noise, taken
from shoal.ops.losses import squared_error
from shoal.ops.shuffle import check_minibatches, minibatch_rows, strata
from shoal.types import Agent, Array, Axis, Batch, Discrete, Key, Net, Outputs, Space, Tree

NEEDS = "discrete actions"


class Knobs(NamedTuple):
    """Hyper-parameters that may differ per agent and change without recompiling."""

    lr: float = 5e-4  # RAdam's step size, at the start where annealed
    gamma: float = 0.99  # discount per step
    q_lambda: float = 0.65  # 0: one-step targets, 1: whole returns
    epsilon_start: float = 1.0  # share of random actions at first
    epsilon_end: float = 0.05  # and at last
    exploration: float = 0.5  # share of the budget over which it falls, linearly
    max_grad_norm: float = 10.0  # over all parameters together


RANGES = {  # what a knob may be, both ends included; inf switches the clip off
    "lr": (0.0, LARGEST),
    "gamma": (0.0, 1.0),
    "q_lambda": (0.0, 1.0),
    "epsilon_start": (0.0, 1.0),
    "epsilon_end": (0.0, 1.0),
    "exploration": (0.0, 1.0),
    "max_grad_norm": (0.0, float("inf")),
}
SEARCH = {"lr": "log:1e-5..1e-2", "q_lambda": "0..1"}  # worth a search where none is named


@dataclass(frozen=True)
class Sizes:
    """Settings that shape the program."""

    num_envs: int = 4  # per agent
    num_steps: int = 128  # per env and update
    epochs: int = 4
    minibatches: int = 4
    hidden: tuple[int, ...] = (120, 84)
    activation: str = "relu"
    layer_norm: bool = True  # before every activation
    anneal: bool = True  # lr falls linearly to 0 over the budget

    def __post_init__(self) -> None:
        check_counts("pqn", vars(self), "num_envs", "num_steps", "epochs", "minibatches")
        check_layers(self.hidden, self.activation)
        check_minibatches("pqn", self.num_envs, self.num_steps, self.minibatches)

    @property
    def strata(self) -> int:
        """Groups that an agent's envs may be divided into; see `ops.shuffle.strata`."""
        return strata(self.num_envs, self.num_envs * self.num_steps // self.minibatches)


class Learner(NamedTuple):
    knobs: Knobs
    params: Tree
    radam: optax.OptState
    progress: Array  # share of the budget spent, as of the last rollout
    local: Tree = ()
    replay: Tree = ()


class Policy(NamedTuple):
    q: Tree
    epsilon: Array


class Data(NamedTuple):
    """One rollout, flattened to rows [T * B]; minibatches index into it."""

    obs: Tree
    action: Array
    target: Array


def make(obs_space: Space, action_space: Space, sizes: Sizes, net: NetMaker) -> Agent:
    """PQN for one discrete action; `net` makes the network of its values."""
    if not isinstance(action_space, Discrete):
        raise ShoalError(
            f"pqn needs discrete actions, not {describe(action_space)}", "--algo ppo takes any action space"
        )
    q = Net(*net(obs_space, action_space.n, 1.0))

    def init(key: Key, knobs: Knobs) -> Learner:
        params = q.init(key)
        return Learner(knobs, params, RADAM.init(params), jnp.zeros((), jnp.float32))

    def policy(learner: Learner) -> Policy:
        knobs = learner.knobs
        schedule = knobs.epsilon_start, knobs.epsilon_end, knobs.exploration
        return Policy(learner.params, annealed(*schedule, learner.progress))

    def act(policy: Policy, carry: Tree, obs: Tree, mask: Tree, noise: Tree):
        return carry, epsilon_greedy(q.apply(policy.q, obs), mask, policy.epsilon, noise), {}

    def prepare(learner: Learner, batch: Batch, axis: Axis):
        return _prepare(q, sizes, learner, batch, axis)

    def grad(learner: Learner, data: Data, index: Array):
        return _grad(q, learner, data, index)

    def apply(learner: Learner, gradient: Tree, outputs: Outputs) -> Learner:
        return _apply(sizes, learner, gradient)

    return Agent(init, policy, lambda: (), exploration_noise, act, prepare, grad, apply)


RADAM = optax.scale_by_radam()


# --- Targets ----------------------------------------------------------------------------------


def _prepare(q: Net, sizes: Sizes, learner: Learner, batch: Batch, axis: Axis):
    """Q(lambda) returns of one rollout, and the shuffled rows of all minibatches."""
    best = lambda seen: jnp.max(allowed(q.apply(learner.params, seen[0]), seen[1]), -1)
    seen, final = (batch.obs, batch.mask), (batch.final_obs, batch.final_mask)
    _, next_value = values(best, seen, final, batch.truncated)
    ends, knobs = (batch.terminated, batch.truncated), learner.knobs
    target = lambda_returns(batch.reward, next_value, *ends, knobs.gamma, knobs.q_lambda)
    data = Data(batch.obs, batch.action, target)
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    shape = sizes.num_envs, sizes.num_steps, sizes.epochs, sizes.minibatches
    return learner._replace(progress=batch.progress), data, minibatch_rows(batch.key, *shape, axis)


# --- Gradient ---------------------------------------------------------------------------------


def _grad(q: Net, learner: Learner, data: Data, index: Array):
    mini = jax.tree.map(lambda x: x[index], data)
    gradient, metrics = jax.grad(lambda params: _loss(q, params, mini), has_aux=True)(learner.params)
    return gradient, jnp.float32(index.shape[0]), Outputs(metrics)


def _loss(q: Net, params: Tree, mini: Data) -> tuple[Array, dict[str, Array]]:
    """Summed over the minibatch's rows."""
    value = taken(q.apply(params, mini.obs), mini.action)
    loss = jnp.sum(squared_error(value, mini.target))
    return loss, {"value_loss": loss, "q_value": jnp.sum(value)}


def _apply(sizes: Sizes, learner: Learner, gradient: Tree) -> Learner:
    knobs = learner.knobs
    lr = knobs.lr * (1 - learner.progress) if sizes.anneal else knobs.lr
    params, radam = descend(RADAM, learner.radam, learner.params, gradient, lr, knobs.max_grad_norm)
    return learner._replace(params=params, radam=radam)
