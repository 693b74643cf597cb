"""Deep Q-learning (Mnih et al. 2015, Nature 518, algorithm 1), with what later papers added.

Double: the online network chooses the action that the target network values (van Hasselt et al. 2016,
arXiv:1509.06461, eq. 4). Dueling: values and advantages (Wang et al. 2016, arXiv:1511.06581, eq. 9). n-step
returns (Sutton 1988). Prioritised replay (Schaul et al. 2016, arXiv:1511.05952, algorithm 1), with new
priorities from each minibatch once it has been learned from. Sizes are CleanRL's for classic control,
and first weights those of its JAX version.
Differs: an update is `num_envs * num_steps` env steps and then `minibatches` gradient steps, all drawn before
the first; the dueling streams part at the last layer; the error is squared, not clipped; truncated steps
bootstrap from their true final observation; forbidden actions are neither taken nor bootstrapped from.
Left out: soft target updates, noisy networks, clipping rewards.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shoal.envs.spaces import describe, mask_space, zeros
from shoal.errors import LARGEST, ShoalError, check_counts
from shoal.nets import NetMaker, check_layers
from shoal.ops import priorities, replay
from shoal.ops.descent import descend
from shoal.ops.distributions import allowed
from shoal.ops.exploration import annealed, epsilon_greedy, exploration_noise, taken
from shoal.ops.losses import squared_error
from shoal.ops.replay import Steps
from shoal.ops.shuffle import strata
from shoal.types import Agent, Array, Axis, Batch, Discrete, Key, Net, Outputs, Space, Tree

NEEDS = "discrete actions"


class Knobs(NamedTuple):
    """Hyper-parameters that may differ per agent and change without recompiling."""

    lr: float = 2.5e-4  # Adam's step size
    gamma: float = 0.99  # discount per step
    epsilon_start: float = 1.0  # share of random actions at first
    epsilon_end: float = 0.05  # and at last
    exploration: float = 0.5  # share of the budget over which it falls, linearly
    alpha: float = 0.6  # where prioritised: priority = error ^ alpha
    beta: float = 0.4  # where prioritised: exponent of the weights at first; rises linearly to 1


RANGES = {  # what a knob may be, both ends included
    "lr": (0.0, LARGEST),
    "gamma": (0.0, 1.0),
    "epsilon_start": (0.0, 1.0),
    "epsilon_end": (0.0, 1.0),
    "exploration": (0.0, 1.0),
    "alpha": (0.0, 1.0),
    "beta": (0.0, 1.0),
}
SEARCH = {"lr": "log:1e-5..1e-2", "epsilon_end": "log:1e-3..1e-1"}  # worth a search where none is named


@dataclass(frozen=True)
class Sizes:
    """Settings that shape the program."""

    num_envs: int = 10  # per agent
    num_steps: int = 1  # per env and update
    minibatches: int = 1  # gradient steps per update
    batch_size: int = 128  # rows of a minibatch
    buffer_size: int = 10_000  # env steps kept per agent, over all its envs
    learning_starts: int = 10_000  # env steps per agent before the first gradient step
    target_every: int = 500  # env steps per agent between copies to the target network
    n_step: int = 1  # rewards before bootstrapping
    double: bool = True  # the online network chooses the next action, the target network values it
    dueling: bool = False  # a value and advantages instead of values of actions
    prioritised: bool = False  # replay in proportion to the last error
    hidden: tuple[int, ...] = (120, 84)
    activation: str = "relu"
    init: str = "lecun"  # first weights: lecun or orthogonal

    def __post_init__(self) -> None:
        counts = "num_envs", "num_steps", "minibatches", "learning_starts", "target_every", "n_step"
        check_counts("dqn", vars(self), *counts)
        check_layers(self.hidden, self.activation, self.init)
        replay.check_replay("dqn", self.num_envs, self.num_steps, self.buffer_size, self.batch_size)
        if self.n_step > self.slots:
            raise ShoalError(f"n_step = {self.n_step} is more than the {self.slots} steps kept per env")

    @property
    def strata(self) -> int:
        """Groups that an agent's envs may be divided into; see `ops.shuffle.strata`."""
        return strata(self.num_envs, self.batch_size)

    @property
    def slots(self) -> int:
        """Steps kept per env."""
        return self.buffer_size // self.num_envs


class Local(NamedTuple):
    """Per env."""

    priority: Array  # [slots]


class Learner(NamedTuple):
    knobs: Knobs
    params: Tree
    target: Tree  # params as of the last copy
    adam: optax.OptState
    progress: Array  # share of the budget spent, as of the last rollout
    written: Array  # int32: steps that each env has put into the replay
    replay: Steps
    local: Tree  # Local where prioritised


class Policy(NamedTuple):
    """What acting needs: no target network."""

    q: Tree
    epsilon: Array  # chance of a random action


class Rows(NamedTuple):
    """[M, n]: what a minibatch learns from; its target is reward + discount * value of final_obs."""

    obs: Tree
    action: Array
    reward: Array  # discounted sum of up to n_step rewards
    discount: Array  # 0 after a termination
    final_obs: Tree
    final_mask: Tree
    weight: Array  # importance weights, 1 where uniform; 0 before learning starts
    index: Tree  # where the rows came from, where prioritised


def make(obs_space: Space, action_space: Space, sizes: Sizes, net: NetMaker) -> Agent:
    """DQN for discrete actions; `net` makes the network, online and target."""
    if not isinstance(action_space, Discrete):
        raise ShoalError(
            f"dqn needs discrete actions, not {describe(action_space)}", "--algo ppo takes any action space"
        )
    network = Net(*net(obs_space, action_space.n + sizes.dueling, 1.0))

    def values(params: Tree, obs: Tree) -> Array:
        return _dueling(network.apply(params, obs)) if sizes.dueling else network.apply(params, obs)

    def init(key: Key, knobs: Knobs) -> Learner:
        params, zero = network.init(key), jnp.zeros((), jnp.float32)
        mask = zeros(mask_space(action_space))  # kept always: an agent is made without knowing its env
        ring = replay.empty(sizes.slots, zeros(obs_space), zeros(action_space), mask)
        local = Local(jnp.zeros((sizes.slots,), jnp.float32)) if sizes.prioritised else ()
        return Learner(knobs, params, params, ADAM.init(params), zero, jnp.int32(0), ring, local)

    def policy(learner: Learner) -> Policy:
        knobs = learner.knobs
        schedule = knobs.epsilon_start, knobs.epsilon_end, knobs.exploration
        return Policy(learner.params, annealed(*schedule, learner.progress))

    def act(policy: Policy, carry: Tree, obs: Tree, mask: Tree, noise: Array | None):
        q = values(policy.q, obs)
        return carry, epsilon_greedy(q, mask, policy.epsilon, noise), {}

    def prepare(learner: Learner, batch: Batch, axis: Axis):
        return _prepare(sizes, learner, batch, axis)

    def grad(learner: Learner, data: Tree, rows: Rows):
        return _grad(values, sizes, learner, rows)

    def apply(learner: Learner, gradient: Tree, outputs: Outputs) -> Learner:
        return _apply(sizes, learner, gradient, outputs)

    return Agent(init, policy, lambda: (), exploration_noise, act, prepare, grad, apply)


ADAM = optax.scale_by_adam()


def _dueling(outputs: Array) -> Array:
    """Q = V + A - mean(A) (Wang et al., eq. 9); V is the last output."""
    advantage = outputs[:, :-1]
    return outputs[:, -1:] + advantage - jnp.mean(advantage, -1, keepdims=True)


# --- Targets ----------------------------------------------------------------------------------


def _prepare(sizes: Sizes, learner: Learner, batch: Batch, axis: Axis):
    """Write the rollout into the replay, and draw all minibatches of the update from it."""
    knobs, per_update = learner.knobs, sizes.num_envs * sizes.num_steps
    # A copy is due after the update in which its time has come; this one comes first thing in the next.
    due = learner.written * sizes.num_envs % sizes.target_every < per_update
    target = jax.tree.map(lambda new, old: jnp.where(due, new, old), learner.params, learner.target)
    ring = replay.insert(learner.replay, batch, learner.written)
    written = learner.written + sizes.num_steps
    filled = jnp.minimum(written, sizes.slots)

    started = (written >= -(-sizes.learning_starts // sizes.num_envs)).astype(jnp.float32)
    if sizes.prioritised:
        priority = priorities.enter(learner.local.priority, learner.written, sizes.num_steps, axis)
        index, chance = priorities.sample_prioritised(
            batch.key, sizes.num_envs, priority, sizes.minibatches, sizes.batch_size, axis
        )
        beta = knobs.beta + batch.progress * (1 - knobs.beta)
        weight = started * priorities.weights(chance, filled * sizes.num_envs, beta, axis)
        learner = learner._replace(local=Local(priority))
    else:
        index = replay.sample_uniform(
            batch.key, sizes.num_envs, filled, sizes.minibatches, sizes.batch_size, axis
        )
        weight = jnp.broadcast_to(started, index.env.shape)

    obs, action = replay.gather((ring.obs, ring.action), index)
    returns = replay.n_step(ring, index, written, sizes.n_step, knobs.gamma)
    rows = Rows(obs, action, **returns._asdict(), weight=weight, index=index if sizes.prioritised else ())
    learner = learner._replace(replay=ring, written=written, target=target, progress=batch.progress)
    return learner, (), rows


# --- Gradient ---------------------------------------------------------------------------------


def _grad(values, sizes: Sizes, learner: Learner, rows: Rows):
    target = _target(values, sizes, learner, rows)
    loss = lambda params: _loss(values, params, rows, target)
    gradient, (metrics, error) = jax.grad(loss, has_aux=True)(learner.params)
    samples: Tree = ()
    if sizes.prioritised:
        samples = rows.index, jnp.power(jnp.abs(error) + priorities.SMALLEST, learner.knobs.alpha)
    return gradient, jnp.sum(rows.weight > 0, dtype=jnp.float32), Outputs(metrics, samples)


def _target(values, sizes: Sizes, learner: Learner, rows: Rows) -> Array:
    """What each row's action is worth [n]."""
    next_q = values(learner.target, rows.final_obs)
    chooser = values(learner.params, rows.final_obs) if sizes.double else next_q
    best = jnp.argmax(allowed(chooser, rows.final_mask), -1)
    return rows.reward + rows.discount * taken(next_q, best)


def _loss(values, params: Tree, rows: Rows, target: Array):
    """Summed over the minibatch's rows."""
    q = taken(values(params, rows.obs), rows.action)
    loss = jnp.sum(rows.weight * squared_error(q, target))
    used = rows.weight > 0
    return loss, ({"value_loss": loss, "q_value": jnp.sum(jnp.where(used, q, 0.0))}, q - target)


def _apply(sizes: Sizes, learner: Learner, gradient: Tree, outputs: Outputs) -> Learner:
    params, adam = descend(ADAM, learner.adam, learner.params, gradient, learner.knobs.lr)
    if sizes.prioritised:
        index, new = outputs.samples
        priority = learner.local.priority.at[index.env, index.slot].set(new)
        learner = learner._replace(local=Local(priority))
    return learner._replace(params=params, adam=adam)
