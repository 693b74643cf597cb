"""Recurrent PPO: Proximal Policy Optimization with a gated recurrent unit, for what one observation hides.

Everything but memory is PPO's (see ppo.py; Schulman et al. 2017, arXiv:1707.06347, eq. 7), with the recurrent
details of Huang et al. 2022, "The 37 Implementation Details of PPO": minibatches are whole sequences of envs,
from the state that each had when the rollout began, with memory dropped where an episode did; gradients flow
back to the start of the rollout (Werbos 1990). The unit is Cho et al. 2014's, arXiv:1406.1078.
Actor and critic have a unit each, as they share nothing in PPO here: neither loss can disturb the other's
memory, and a policy still holds no critic. The critic's state is therefore not carried by acting but kept
from rollout to rollout in `Local`. It costs twice the products of a shared unit.
Left out: recomputing starting states with newer weights (Kapturowski et al. 2019); a rollout is fresh.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.algos import ppo
from shoal.algos.ppo import Learner, Params, Policy
from shoal.envs.spaces import zeros
from shoal.errors import ShoalError, check_counts
from shoal.nets import NetMaker, check_layers, recurrent
from shoal.nets.recurrent import RecurrentNet, check_units
from shoal.ops.advantages import gae
from shoal.ops.bootstrap import values
from shoal.ops.distributions import Distribution, distribution
from shoal.ops.shuffle import minibatch_rows, strata
from shoal.ops.statistics import no_moments, observe
from shoal.types import Agent, Array, Axis, Batch, Key, Outputs, Space, Tree

NEEDS = "any action space"
Knobs = ppo.Knobs
RANGES = ppo.RANGES
SEARCH = ppo.SEARCH


@dataclass(frozen=True)
class Sizes:
    """Settings that shape the program."""

    num_envs: int = 8  # per agent
    num_steps: int = 128  # per env and update; gradients flow back no further
    epochs: int = 4
    minibatches: int = 4  # each whole sequences of num_envs / minibatches envs
    hidden: tuple[int, ...] = (64,)  # before the recurrent layer
    units: int = 64  # of the recurrent layer
    activation: str = "tanh"
    anneal: bool = True  # lr falls linearly to 0 over the budget
    clip_value: bool = True
    normalize_advantage: bool = True
    normalize_obs: bool = False  # running mean and variance of every float observation
    normalize_reward: bool = False  # by the running deviation of the discounted return

    def __post_init__(self) -> None:
        check_counts("rppo", vars(self), "num_envs", "num_steps", "epochs", "minibatches")
        check_layers(self.hidden, self.activation)
        check_units(self.units)
        if left := self.num_envs % self.minibatches:
            more, fewer = self.num_envs + self.minibatches - left, self.num_envs - left
            fits = f"{fewer} or {more}" if fewer else f"{more}"
            raise ShoalError(
                f"num_envs = {self.num_envs} is not divisible by minibatches = {self.minibatches}; "
                "a minibatch is whole sequences of envs",
                f"try --rppo.num_envs {fits}",
            )

    @property
    def strata(self) -> int:
        """Groups that an agent's envs may be divided into; see `ops.shuffle.strata`."""
        return strata(self.num_envs, self.num_envs // self.minibatches)


class Local(NamedTuple):
    """Per env."""

    discounted_return: Array  # what reward normalisation measures the spread of
    critic_carry: Array  # the critic's state before the next rollout


class Data(NamedTuple):
    """One rollout; minibatches are columns of it."""

    steps: ppo.Data  # [T, B, …]
    fresh: Array  # [T, B] first steps of episodes
    carry: Params  # [B, H] states before the first step


class Rows(NamedTuple):
    """[M, n] envs"""

    index: Array  # type: ignore[assignment]
    advantage: Array  # [M, n, T]


def make(obs_space: Space, action_space: Space, sizes: Sizes, net: NetMaker) -> Agent:
    """Recurrent PPO for any action space; `net` makes what lies before each recurrent layer."""
    dist = distribution(action_space)
    actor = recurrent.make(net, obs_space, dist.size, 0.01, sizes.units)
    critic = recurrent.make(net, obs_space, 1, 1.0, sizes.units)

    def init(key: Key, knobs: Knobs) -> Learner:
        actor_key, critic_key = jax.random.split(key)
        params = Params(actor.init(actor_key), critic.init(critic_key), dist.free)
        zero = jnp.zeros((), jnp.float32)
        obs_moments = no_moments(zeros(obs_space) if sizes.normalize_obs else ())
        local = Local(zero, critic.carry())
        return Learner(knobs, params, ppo.ADAM.init(params), zero, obs_moments, no_moments(zero), local)

    def policy(learner: Learner) -> Policy:
        return Policy(learner.params.actor, learner.params.free, learner.obs_moments)

    def act(policy: Policy, carry: Array, obs: Tree, mask: Tree, noise: Tree):
        seen = ppo.seen(sizes, policy.obs_moments, obs)
        carry, outputs = actor.step(policy.actor, carry, seen)
        sample = dist.sample(outputs, policy.free, mask, noise)
        log_prob = dist.log_prob(outputs, policy.free, mask, sample)
        return carry, dist.action(sample), {"sample": sample, "log_prob": log_prob}

    def prepare(learner: Learner, batch: Batch, axis: Axis):
        return _prepare(critic, sizes, learner, batch, axis)

    def grad(learner: Learner, data: Data, rows: Rows):
        return _grad(actor, critic, dist, sizes, learner, data, rows)

    def apply(learner: Learner, gradient: Params, outputs: Outputs) -> Learner:
        return ppo.take_step(sizes, learner, gradient)

    return Agent(init, policy, actor.carry, dist.noise, act, prepare, grad, apply)


# --- Targets ----------------------------------------------------------------------------------


def _prepare(critic: RecurrentNet, sizes: Sizes, learner: Learner, batch: Batch, axis: Axis):
    """As PPO's, but a value follows from memory too: of the steps before its observation."""
    obs = ppo.seen(sizes, learner.obs_moments, batch.obs)
    final_obs = ppo.seen(sizes, learner.obs_moments, batch.final_obs)
    reward, local, return_moments = ppo.scaled_reward(sizes, learner, batch, axis)
    ended = batch.terminated | batch.truncated
    fresh = jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])
    before, after, _ = critic.unroll(learner.params.critic, local.critic_carry, obs, fresh)
    read = lambda seen: critic.step(learner.params.critic, *seen)[1][:, 0]
    value, next_value = values(read, (before, obs), (after, final_obs), batch.truncated)
    ends, knobs = (batch.terminated, batch.truncated), learner.knobs
    advantage = gae(reward, value, next_value, *ends, knobs.gamma, knobs.gae_lambda)

    steps = obs, batch.mask, batch.extras["sample"], batch.extras["log_prob"], value, advantage + value
    data = Data(ppo.Data(*steps), fresh, Params(batch.carry, local.critic_carry, ()))
    rows = _shuffled(sizes, advantage, batch.key, axis)
    carried = jnp.where(ended[-1][:, None], critic.carry(), after[-1])
    if sizes.normalize_obs:
        learner = learner._replace(obs_moments=observe(learner.obs_moments, batch.obs, 2, axis))
    local = local._replace(critic_carry=carried)
    return learner._replace(progress=batch.progress, return_moments=return_moments, local=local), data, rows


def _shuffled(sizes: Sizes, advantage: Array, key: Key, axis: Axis) -> Rows:
    """Envs of all minibatches [epochs * minibatches, n here], and their normalised advantages."""
    index = minibatch_rows(key, sizes.num_envs, 1, sizes.epochs, sizes.minibatches, axis)
    advantage = advantage.T[index]
    return Rows(index, ppo.standardized(advantage, axis) if sizes.normalize_advantage else advantage)


# --- Gradient ---------------------------------------------------------------------------------


def _grad(actor, critic, dist, sizes: Sizes, learner: Learner, data: Data, rows: Rows):
    steps, fresh = jax.tree.map(lambda x: x[:, rows.index], (data.steps, data.fresh))
    carry = jax.tree.map(lambda x: x[rows.index], data.carry)
    mini = Data(steps, fresh, carry)
    loss = lambda params: _loss(actor, critic, dist, sizes, learner.knobs, params, mini, rows.advantage.T)
    gradient, metrics = jax.grad(loss, has_aux=True)(learner.params)
    return gradient, jnp.float32(fresh.size), Outputs(metrics)


def _loss(
    actor: RecurrentNet,
    critic: RecurrentNet,
    dist: Distribution,
    sizes: Sizes,
    knobs: Knobs,
    params: Params,
    mini: Data,
    advantage: Array,
):
    """Summed over the minibatch's rows [T, n]."""
    *_, outputs = actor.unroll(params.actor, mini.carry.actor, mini.steps.obs, mini.fresh)
    *_, value = critic.unroll(params.critic, mini.carry.critic, mini.steps.obs, mini.fresh)
    return ppo.objective(dist, sizes, knobs, params.free, outputs, value[..., 0], mini.steps, advantage)
