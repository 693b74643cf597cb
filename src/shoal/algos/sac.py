"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905): off-policy, with a policy that stays random.

Two soft critics (eq. 5, towards the smaller of their two targets), a Gaussian policy squashed into the
actions' bounds (eq. 9, app. C), and a temperature that holds its entropy at a target (eq. 18). Differs: an
update is `num_envs * num_steps` env steps and then `minibatches` gradient steps, all drawn before the first;
one backward pass serves all parts, so the policy's gradient sees the critics as they are before the step;
log deviations are bent into their bounds, as in Yarats & Kostrikov's PyTorch SAC, not clipped; the replay
holds fewer steps than the paper's million, since a population has as many replays as agents; truncated steps
bootstrap from their true final observation. Left out: the value network of the paper's first version.
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
from shoal.ops import replay
from shoal.ops.descent import descend, follow
from shoal.ops.losses import squared_error
from shoal.ops.replay import Steps
from shoal.ops.shuffle import strata
from shoal.ops.squashed import bounded, squashed, uniform
from shoal.types import Agent, Array, Axis, Batch, Box, Key, Net, Outputs, Space, Tree

NEEDS = "continuous actions within bounds"


class Knobs(NamedTuple):
    """Hyper-parameters that may differ per agent and change without recompiling."""

    lr: float = 3e-4  # Adam's step size, of actor, critics and temperature
    gamma: float = 0.99  # discount per step
    tau: float = 0.005  # share of the critics that their targets take over per gradient step
    alpha: float = 1.0  # temperature: what a nat of entropy is worth; at the start where it is tuned
    target_entropy: float = -1.0  # nats per entry of the action, whose range counts as -1 … 1


RANGES = {  # what a knob may be, both ends included
    "lr": (0.0, LARGEST),
    "gamma": (0.0, 1.0),
    "tau": (0.0, 1.0),
    "alpha": (1e-8, LARGEST),
    "target_entropy": (-LARGEST, math.log(2)),  # the most there is: that of uniform actions
}
SEARCH = {"lr": "log:1e-4..1e-2", "tau": "log:1e-3..1e-1"}  # worth a search where none is named


@dataclass(frozen=True)
class Sizes:
    """Settings that shape the program."""

    num_envs: int = 4  # per agent
    num_steps: int = 2  # per env and update
    minibatches: int = 8  # gradient steps per update
    batch_size: int = 256  # rows of a minibatch
    buffer_size: int = 100_000  # env steps kept per agent
    learning_starts: int = 1_000  # env steps per agent with random actions and no learning
    tune_alpha: bool = True  # move the temperature towards the target entropy
    hidden: tuple[int, ...] = (256, 256)
    activation: str = "relu"

    def __post_init__(self) -> None:
        check_counts("sac", vars(self), "num_envs", "num_steps", "minibatches", "learning_starts")
        check_layers(self.hidden, self.activation)
        replay.check_replay("sac", self.num_envs, self.num_steps, self.buffer_size, self.batch_size)

    @property
    def strata(self) -> int:
        """Groups that an agent's envs may be divided into; see `ops.shuffle.strata`."""
        return strata(self.num_envs, self.batch_size)

    @property
    def slots(self) -> int:
        """Steps kept per env."""
        return self.buffer_size // self.num_envs

    @property
    def random_steps(self) -> int:
        """Steps of each env before learning starts."""
        return -(-self.learning_starts // self.num_envs)


class Params(NamedTuple):
    actor: Tree
    critics: Tree  # leaves are led by the two
    log_alpha: Array


class Learner(NamedTuple):
    knobs: Knobs
    params: Params
    adam: optax.OptState
    target: Tree  # the critics, lagging behind
    written: Array  # int32: steps that each env has put into the replay
    replay: Steps
    local: Tree = ()


class Policy(NamedTuple):
    """What acting needs: no critic."""

    actor: Tree
    random: Array  # bool: learning has not started


class Rows(NamedTuple):
    """[M, n]"""

    steps: Steps  # actions are vectors in -1 … 1
    weight: Array  # 0 before learning starts, then 1
    noise: Array  # [M, n, 2 * A] for the actions drawn at final_obs and at obs


def make(obs_space: Space, action_space: Space, sizes: Sizes, net: NetMaker) -> Agent:
    """SAC for actions in bounded boxes; `net` makes the actor's and the critics' network."""
    space = bounded(action_space, "sac")
    vectors = Box(-1.0, 1.0, (space.size,))
    actor = Net(*net(obs_space, 2 * space.size, 0.01))
    critic = Net(*net({"obs": obs_space, "action": vectors}, 1, 1.0))

    def init(key: Key, knobs: Knobs) -> Learner:
        actor_key, *critic_keys = jax.random.split(key, 3)
        critics = jax.vmap(critic.init)(jnp.stack(critic_keys))
        params = Params(actor.init(actor_key), critics, jnp.log(jnp.asarray(knobs.alpha, jnp.float32)))
        ring = replay.empty(sizes.slots, zeros(obs_space), zeros(vectors))
        return Learner(knobs, params, ADAM.init(params), critics, jnp.int32(0), ring)

    def policy(learner: Learner) -> Policy:
        return Policy(learner.params.actor, learner.written < sizes.random_steps)

    def noise(key: Key, steps: int) -> Array:
        return jax.random.normal(key, (steps, space.size), jnp.float32)

    def act(policy: Policy, carry: Tree, obs: Tree, mask: Tree, noise: Array | None):
        vector, _ = squashed(actor.apply(policy.actor, obs), noise)
        if noise is not None:
            vector = jnp.where(policy.random, uniform(noise), vector)
        return carry, space.action(vector), {"vector": vector}

    def prepare(learner: Learner, batch: Batch, axis: Axis):
        learner, *rows = replayed(sizes, 2 * space.size, learner, batch, axis)
        return learner, (), Rows(*rows)

    def grad(learner: Learner, data: Tree, rows: Rows):
        target = _target(actor, critic, sizes, learner, rows)
        loss = lambda params: _loss(actor, critic, sizes, learner, params, rows, target)
        gradient, metrics = jax.grad(loss, has_aux=True)(learner.params)
        return gradient, jnp.sum(rows.weight), Outputs(metrics)

    return Agent(init, policy, lambda: (), noise, act, prepare, grad, _apply)


ADAM = optax.scale_by_adam()


# --- Targets ----------------------------------------------------------------------------------


def replayed(sizes: Any, noises: int, learner: Any, batch: Batch, axis: Axis):
    """The learner with a rollout in its replay; from that, steps [M, n], weights and noise for each."""
    batch = batch._replace(action=batch.extras["vector"])
    ring = replay.insert(learner.replay, batch, learner.written)
    written = learner.written + sizes.num_steps
    learner = learner._replace(written=written, replay=ring)
    row_key, noise_key = jax.random.split(batch.key)
    drawn = sizes.minibatches, sizes.batch_size
    index = replay.sample_uniform(row_key, sizes.num_envs, jnp.minimum(written, sizes.slots), *drawn, axis)
    noise = replay.sample_normal(noise_key, sizes.num_envs, *drawn, noises, axis)
    weight = jnp.broadcast_to(jnp.float32(written >= sizes.random_steps), index.env.shape)
    return learner, replay.gather(ring, index), weight, noise


def both(critic: Net, critics: Tree, obs: Tree, action: Array) -> Array:
    """Q of the two critics [2, n]."""
    return jax.vmap(critic.apply, (0, None))(critics, {"obs": obs, "action": action})[..., 0]


def _alpha(sizes: Sizes, knobs: Knobs, params: Params) -> Array | float:
    return jnp.exp(params.log_alpha) if sizes.tune_alpha else knobs.alpha


def _target(actor: Net, critic: Net, sizes: Sizes, learner: Learner, rows: Rows) -> Array:
    """Soft value of each step [n], eq. 5 and 3."""
    knobs, steps = learner.knobs, rows.steps
    noise, _ = jnp.split(rows.noise, 2, -1)
    action, log_prob = squashed(actor.apply(learner.params.actor, steps.final_obs), noise)
    value = jnp.min(both(critic, learner.target, steps.final_obs, action), 0)
    value = value - _alpha(sizes, knobs, learner.params) * log_prob
    return steps.reward + knobs.gamma * jnp.where(steps.terminated, 0.0, value)


# --- Gradient ---------------------------------------------------------------------------------


def _loss(actor, critic, sizes: Sizes, learner: Learner, params: Params, rows: Rows, target: Array):
    """Summed over the minibatch's rows."""
    total = lambda x: jnp.sum(rows.weight * x)
    obs, fixed = rows.steps.obs, jax.lax.stop_gradient
    q = both(critic, params.critics, obs, rows.steps.action)
    critic_loss = total(jnp.sum(squared_error(q, target), 0))
    _, noise = jnp.split(rows.noise, 2, -1)
    action, log_prob = squashed(actor.apply(params.actor, obs), noise)
    alpha = _alpha(sizes, learner.knobs, learner.params)
    policy_loss = total(alpha * log_prob - jnp.min(both(critic, learner.params.critics, obs, action), 0))
    lack = fixed(log_prob) + learner.knobs.target_entropy * action.shape[-1]
    alpha_loss = -total(jnp.exp(params.log_alpha) * lack) if sizes.tune_alpha else 0.0
    return critic_loss + policy_loss + alpha_loss, {
        "critic_loss": critic_loss,
        "policy_loss": policy_loss,
        "q": total(jnp.mean(q, 0)),
        "entropy": -total(log_prob),
        "alpha": total(alpha),
    }


def _apply(learner: Learner, gradient: Params, outputs: Outputs) -> Learner:
    knobs = learner.knobs
    params, adam = descend(ADAM, learner.adam, learner.params, gradient, knobs.lr)
    return learner._replace(
        params=params, adam=adam, target=follow(learner.target, params.critics, knobs.tau)
    )
