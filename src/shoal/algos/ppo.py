"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347).

The clipped objective (eq. 7) on generalised advantage estimates, with the details that matter in practice
(Huang et al. 2022, "The 37 Implementation Details of PPO"): advantages normalised per minibatch, clipped
value loss, global-norm clipping, Adam with eps 1e-5, linear annealing, orthogonal weights. Actor and
critic share nothing. Values bootstrap through truncation from the true final observation.
Left out: the KL penalty variant (no better in the paper) and recurrent networks.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shoal.envs.spaces import zeros
from shoal.errors import LARGEST, check_counts
from shoal.nets import NetMaker, check_layers
from shoal.ops.advantages import discounted_sums, gae
from shoal.ops.bootstrap import values
from shoal.ops.descent import descend, warmed
from shoal.ops.distributions import Distribution, distribution
from shoal.ops.losses import clipped_squared_error, clipped_surrogate, squared_error
from shoal.ops.shuffle import check_minibatches, minibatch_rows, strata
from shoal.ops.statistics import Moments, no_moments, normalize, observe, variance
from shoal.types import Agent, Array, Axis, Batch, Key, Net, Outputs, Space, Tree

NEEDS = "any action space"


class Knobs(NamedTuple):
    """Hyper-parameters that may differ per agent and change without recompiling."""

    lr: float = 2.5e-4  # Adam's step size, at the start where annealed
    lr_warmup: float = 0.0  # share of the budget over which lr rises from 0, linearly
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95
    clip: float = 0.2  # of the probability ratio, and of the value
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5  # over all parameters together


RANGES = {  # what a knob may be, both ends included; inf switches a clip off
    "lr": (0.0, LARGEST),
    "lr_warmup": (0.0, 1.0),
    "gamma": (0.0, 1.0),
    "gae_lambda": (0.0, 1.0),
    "clip": (0.0, math.inf),
    "ent_coef": (0.0, LARGEST),
    "vf_coef": (0.0, LARGEST),
    "max_grad_norm": (0.0, math.inf),
}


SEARCH = {"lr": "log:1e-5..1e-2", "ent_coef": "log:1e-4..1e-1"}  # worth a search where none is named


@dataclass(frozen=True)
class Sizes:
    """Settings that shape the program."""

    num_envs: int = 4  # per agent
    num_steps: int = 128  # per env and update
    epochs: int = 4
    minibatches: int = 4
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    anneal: bool = True  # lr falls linearly to 0 over the budget
    clip_value: bool = True
    normalize_advantage: bool = True
    normalize_obs: bool = False  # running mean and variance of every float observation
    normalize_reward: bool = False  # by the running deviation of the discounted return

    def __post_init__(self) -> None:
        check_counts("ppo", vars(self), "num_envs", "num_steps", "epochs", "minibatches")
        check_layers(self.hidden, self.activation)
        check_minibatches("ppo", self.num_envs, self.num_steps, self.minibatches)

    @property
    def strata(self) -> int:
        """Groups that an agent's envs may be divided into; see `ops.shuffle.strata`."""
        return strata(self.num_envs, self.num_envs * self.num_steps // self.minibatches)


class Params(NamedTuple):
    actor: Tree
    critic: Tree
    free: Tree  # the action distribution's own parameters (log standard deviations)


class Local(NamedTuple):
    """Per env."""

    discounted_return: Array  # what reward normalisation measures the spread of


class Learner(NamedTuple):
    knobs: Knobs
    params: Params
    adam: optax.OptState
    progress: Array  # share of the budget spent, as of the last rollout
    obs_moments: Moments
    return_moments: Moments
    local: Tree  # Local
    replay: Tree = ()


class Policy(NamedTuple):
    """What acting needs: no critic."""

    actor: Tree
    free: Tree
    obs_moments: Moments


class Data(NamedTuple):
    """One rollout, flattened to rows [T * B]; minibatches index into it."""

    obs: Tree
    mask: Tree
    sample: Tree
    log_prob: Array
    value: Array
    target: Array


class Rows(NamedTuple):
    """[M, n]"""

    index: Array  # type: ignore[assignment]  # into [T * B]
    advantage: Array


def make(obs_space: Space, action_space: Space, sizes: Sizes, net: NetMaker) -> Agent:
    """PPO for any action space; `net` makes the actor's and the critic's network."""
    dist = distribution(action_space)
    actor = Net(*net(obs_space, dist.size, 0.01))
    critic = Net(*net(obs_space, 1, 1.0))

    def init(key: Key, knobs: Knobs) -> Learner:
        actor_key, critic_key = jax.random.split(key)
        params = Params(actor.init(actor_key), critic.init(critic_key), dist.free)
        zero = jnp.zeros((), jnp.float32)
        obs_moments = no_moments(zeros(obs_space) if sizes.normalize_obs else ())
        return Learner(knobs, params, ADAM.init(params), zero, obs_moments, no_moments(zero), Local(zero))

    def policy(learner: Learner) -> Policy:
        return Policy(learner.params.actor, learner.params.free, learner.obs_moments)

    def act(policy: Policy, carry: Tree, obs: Tree, mask: Tree, noise: Tree):
        outputs = actor.apply(policy.actor, seen(sizes, policy.obs_moments, obs))
        sample = dist.sample(outputs, policy.free, mask, noise)
        log_prob = dist.log_prob(outputs, policy.free, mask, sample)
        return carry, dist.action(sample), {"sample": sample, "log_prob": log_prob}

    def prepare(learner: Learner, batch: Batch, axis: Axis):
        return _prepare(critic, sizes, learner, batch, axis)

    def grad(learner: Learner, data: Data, rows: Rows):
        return _grad(actor, critic, dist, sizes, learner, data, rows)

    def apply(learner: Learner, gradient: Params, outputs: Outputs) -> Learner:
        return take_step(sizes, learner, gradient)

    return Agent(init, policy, lambda: (), dist.noise, act, prepare, grad, apply)


ADAM = optax.scale_by_adam(eps=1e-5)


def seen(sizes: Any, moments: Moments, obs: Tree) -> Tree:
    """An observation as the networks see it."""
    return normalize(moments, obs) if sizes.normalize_obs else obs


# --- Targets ----------------------------------------------------------------------------------


def _prepare(critic: Net, sizes: Sizes, learner: Learner, batch: Batch, axis: Axis):
    """Advantages, value targets and shuffled rows of one rollout.

    Observations are normalised with the moments the rollout acted on, so that the first ratio is 1; what
    this rollout adds to them counts from the next one on.
    """
    obs = seen(sizes, learner.obs_moments, batch.obs)
    final_obs = seen(sizes, learner.obs_moments, batch.final_obs)
    reward, local, return_moments = scaled_reward(sizes, learner, batch, axis)
    knobs, ends = learner.knobs, (batch.terminated, batch.truncated)
    read = lambda obs: critic.apply(learner.params.critic, obs)[:, 0]
    value, next_value = values(read, obs, final_obs, batch.truncated)
    advantage = gae(reward, value, next_value, *ends, knobs.gamma, knobs.gae_lambda)
    flat = lambda tree: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
    columns = obs, batch.mask, batch.extras["sample"], batch.extras["log_prob"], value, advantage + value
    data = Data(*map(flat, columns))
    rows = _shuffled(sizes, flat(advantage), batch.key, axis)
    if sizes.normalize_obs:
        learner = learner._replace(obs_moments=observe(learner.obs_moments, batch.obs, 2, axis))
    learner = learner._replace(progress=batch.progress, return_moments=return_moments, local=local)
    return learner, data, rows


def scaled_reward(sizes: Any, learner: Any, batch: Batch, axis: Axis):
    """Rewards, and the learner's `local` and `return_moments` after them."""
    if not sizes.normalize_reward:
        return batch.reward, learner.local, learner.return_moments
    ended = batch.terminated | batch.truncated
    start, gamma = learner.local.discounted_return, learner.knobs.gamma
    carried, returns = discounted_sums(batch.reward, ended, start, gamma)
    local = learner.local._replace(discounted_return=carried)
    moments = observe(learner.return_moments, returns, 2, axis)
    (spread,) = variance(moments)
    reward = jnp.clip(batch.reward * jax.lax.rsqrt(spread + 1e-8), -10.0, 10.0)
    return reward, local, moments


def _shuffled(sizes: Sizes, advantage: Array, key: Key, axis: Axis) -> Rows:
    """Rows of all minibatches [epochs * minibatches, n here], and their normalised advantages."""
    index = minibatch_rows(key, sizes.num_envs, sizes.num_steps, sizes.epochs, sizes.minibatches, axis)
    advantage = advantage[index]
    return Rows(index, standardized(advantage, axis) if sizes.normalize_advantage else advantage)


def standardized(advantage: Array, axis: Axis) -> Array:
    """Each minibatch's advantages [M, n here, …] with mean 0 and deviation 1 over all of its shares."""
    within = tuple(range(1, advantage.ndim))
    count = advantage[0].size * axis.size
    mean = axis.sum(jnp.sum(advantage, within, keepdims=True)) / count
    squares = jnp.sum(jnp.square(advantage - mean), within, keepdims=True)
    deviation = jnp.sqrt(axis.sum(squares) / max(count - 1, 1))
    return (advantage - mean) / (deviation + 1e-8)


# --- Gradient ---------------------------------------------------------------------------------


def _grad(actor: Net, critic: Net, dist: Distribution, sizes: Sizes, learner: Learner, data: Data, rows):
    mini = jax.tree.map(lambda x: x[rows.index], data)
    loss = lambda params: _loss(actor, critic, dist, sizes, learner.knobs, params, mini, rows.advantage)
    gradient, metrics = jax.grad(loss, has_aux=True)(learner.params)
    return gradient, jnp.float32(rows.index.shape[0]), Outputs(metrics)


def _loss(actor, critic, dist, sizes: Sizes, knobs: Knobs, params: Params, mini: Data, advantage: Array):
    """Summed over the minibatch's rows."""
    outputs = actor.apply(params.actor, mini.obs)
    value = critic.apply(params.critic, mini.obs)[:, 0]
    return objective(dist, sizes, knobs, params.free, outputs, value, mini, advantage)


def objective(
    dist: Distribution, sizes: Any, knobs: Knobs, free: Tree, outputs, value, mini: Data, advantage: Array
) -> tuple[Array, dict[str, Array]]:
    """The loss and its parts, summed over all rows, of what actor and critic say now; any axes lead."""
    log_ratio = dist.log_prob(outputs, free, mini.mask, mini.sample) - mini.log_prob
    ratio = jnp.exp(log_ratio)
    if sizes.clip_value:
        value_loss = jnp.sum(clipped_squared_error(value, mini.value, mini.target, knobs.clip))
    else:
        value_loss = jnp.sum(squared_error(value, mini.target))
    policy_loss = jnp.sum(clipped_surrogate(ratio, advantage, knobs.clip))
    entropy = jnp.sum(dist.entropy(outputs, free, mini.mask))
    total = policy_loss + knobs.vf_coef * value_loss - knobs.ent_coef * entropy
    return total, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": jnp.sum(ratio - 1 - log_ratio),  # k3 of Schulman's note on approximating KL
        "clip_fraction": jnp.sum(jnp.abs(ratio - 1) > knobs.clip, dtype=jnp.float32),
    }


def take_step(sizes: Any, learner: Learner, gradient: Params) -> Learner:
    knobs = learner.knobs
    lr = knobs.lr * (1 - learner.progress) if sizes.anneal else knobs.lr
    lr = warmed(lr, knobs.lr_warmup, learner.progress)
    params, adam = descend(ADAM, learner.adam, learner.params, gradient, lr, knobs.max_grad_norm)
    return learner._replace(params=params, adam=adam)
