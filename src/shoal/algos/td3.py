"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1).

A deterministic actor and two critics: targets take the smaller value of the two (sec. 4.2), at actions
smoothed by clipped noise (sec. 5.3), and actor and target networks move only every `delay`-th gradient step
(sec. 5.2). Differs: an update is `num_envs * num_steps` env steps and then `minibatches` gradient steps, all
drawn before the first and a multiple of `delay`; actor and critics share a minibatch's gradient step, so the
actor's sees the critics as they are before it; step sizes are those of the authors' later code; the replay
holds fewer steps than the paper's million, since a population has as many replays as agents; truncated steps
bootstrap from their true final observation.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shoal.algos.sac import both, replayed
from shoal.envs.spaces import zeros
from shoal.errors import LARGEST, ShoalError, check_counts
from shoal.nets import NetMaker, check_layers
from shoal.ops import replay
from shoal.ops.descent import descend, follow
from shoal.ops.losses import squared_error
from shoal.ops.replay import Steps
from shoal.ops.shuffle import strata
from shoal.ops.squashed import bounded, uniform
from shoal.types import Agent, Array, Axis, Batch, Box, Key, Net, Outputs, Space, Tree

NEEDS = "continuous actions within bounds"


class Knobs(NamedTuple):
    """Hyper-parameters that may differ per agent and change without recompiling.

    Noise is in units of half an action's range.
    """

    lr: float = 3e-4  # Adam's step size, of actor and critics
    gamma: float = 0.99  # discount per step
    tau: float = 0.005  # share of the networks that their targets take over
    exploration: float = 0.1  # deviation of the noise on actions in training
    smoothing: float = 0.2  # deviation of the noise on the targets' actions
    smoothing_clip: float = 0.5  # most of it


RANGES = {  # what a knob may be, both ends included
    "lr": (0.0, LARGEST),
    "gamma": (0.0, 1.0),
    "tau": (0.0, 1.0),
    "exploration": (0.0, LARGEST),
    "smoothing": (0.0, LARGEST),
    "smoothing_clip": (0.0, math.inf),
}
SEARCH = {"lr": "log:1e-4..1e-2", "exploration": "log:1e-2..1"}  # worth a search where none is named


@dataclass(frozen=True)
class Sizes:
    """Settings that shape the program."""

    num_envs: int = 4  # per agent
    num_steps: int = 2  # per env and update
    minibatches: int = 8  # gradient steps per update
    delay: int = 2  # of them, every how many the actor and the targets move
    batch_size: int = 256  # rows of a minibatch
    buffer_size: int = 100_000  # env steps kept per agent, over all its envs
    learning_starts: int = 1_000  # env steps per agent with random actions and no learning
    hidden: tuple[int, ...] = (256, 256)
    activation: str = "relu"

    def __post_init__(self) -> None:
        check_counts("td3", vars(self), "num_envs", "num_steps", "minibatches", "delay", "learning_starts")
        if rest := self.minibatches % self.delay:
            raise ShoalError(
                f"minibatches = {self.minibatches} is not divisible by delay = {self.delay}",
                f"try --td3.minibatches {self.minibatches + self.delay - rest}",
            )
        check_layers(self.hidden, self.activation)
        replay.check_replay("td3", self.num_envs, self.num_steps, self.buffer_size, self.batch_size)

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


class Learner(NamedTuple):
    knobs: Knobs
    params: Params
    adam: Params  # an optimiser's state for each: the actor's moves less often
    target: Params  # both, lagging behind
    written: Array  # int32: steps that each env has put into the replay
    replay: Steps
    local: Tree = ()


class Policy(NamedTuple):
    """What acting needs: no critic."""

    actor: Tree
    exploration: Array
    random: Array  # bool: learning has not started


class Rows(NamedTuple):
    """[M, n]"""

    steps: Steps  # actions are vectors in -1 … 1
    weight: Array  # 0 before learning starts, then 1
    noise: Array  # [M, n, A] for smoothing
    turn: Array  # bool [M]: the actor and the targets move


def make(obs_space: Space, action_space: Space, sizes: Sizes, net: NetMaker) -> Agent:
    """TD3 for actions in bounded boxes; `net` makes the actor's and the critics' network."""
    space = bounded(action_space, "td3")
    vectors = Box(-1.0, 1.0, (space.size,))
    actor = Net(*net(obs_space, space.size, 0.01))
    critic = Net(*net({"obs": obs_space, "action": vectors}, 1, 1.0))

    def init(key: Key, knobs: Knobs) -> Learner:
        actor_key, *critic_keys = jax.random.split(key, 3)
        params = Params(actor.init(actor_key), jax.vmap(critic.init)(jnp.stack(critic_keys)))
        ring = replay.empty(sizes.slots, zeros(obs_space), zeros(vectors))
        return Learner(knobs, params, Params(*map(ADAM.init, params)), params, jnp.int32(0), ring)

    def policy(learner: Learner) -> Policy:
        random = learner.written < sizes.random_steps
        return Policy(learner.params.actor, jnp.asarray(learner.knobs.exploration), random)

    def noise(key: Key, steps: int) -> Array:
        return jax.random.normal(key, (steps, space.size), jnp.float32)

    def act(policy: Policy, carry: Tree, obs: Tree, mask: Tree, noise: Array | None):
        vector = jnp.tanh(actor.apply(policy.actor, obs))
        if noise is not None:
            near = jnp.clip(vector + policy.exploration * noise, -1.0, 1.0)
            vector = jnp.where(policy.random, uniform(noise), near)
        return carry, space.action(vector), {"vector": vector}

    def prepare(learner: Learner, batch: Batch, axis: Axis):
        learner, steps, weight, noise = replayed(sizes, space.size, learner, batch, axis)
        # The same for all agents, so that a branch on it is one under vmap too.
        turn = jnp.arange(sizes.minibatches) % sizes.delay == sizes.delay - 1
        return learner, (), Rows(steps, weight, noise, turn)

    def grad(learner: Learner, data: Tree, rows: Rows):
        return _grad(actor, critic, sizes, learner, rows)

    return Agent(init, policy, lambda: (), noise, act, prepare, grad, _apply)


ADAM = optax.scale_by_adam()


# --- Targets ----------------------------------------------------------------------------------


def _target(actor: Net, critic: Net, learner: Learner, rows: Rows) -> Array:
    """What the critics are to say of each step [n]."""
    knobs, target, steps = learner.knobs, learner.target, rows.steps
    noise = jnp.clip(knobs.smoothing * rows.noise, -knobs.smoothing_clip, knobs.smoothing_clip)
    action = jnp.clip(jnp.tanh(actor.apply(target.actor, steps.final_obs)) + noise, -1.0, 1.0)
    value = jnp.min(both(critic, target.critics, steps.final_obs, action), 0)
    return steps.reward + knobs.gamma * jnp.where(steps.terminated, 0.0, value)


# --- Gradient ---------------------------------------------------------------------------------


def _grad(actor: Net, critic: Net, sizes: Sizes, learner: Learner, rows: Rows):
    params, obs = learner.params, rows.steps.obs
    total = lambda x: jnp.sum(rows.weight * x)
    target = _target(actor, critic, learner, rows)

    def critic_loss(critics):
        q = both(critic, critics, obs, rows.steps.action)
        return total(jnp.sum(squared_error(q, target), 0)), total(jnp.mean(q, 0))

    def policy_loss(weights):
        action = jnp.tanh(actor.apply(weights, obs))
        first = jax.tree.map(lambda x: x[0], params.critics)
        return -total(critic.apply(first, {"obs": obs, "action": action})[:, 0])

    (critic_value, q), critics = jax.value_and_grad(critic_loss, has_aux=True)(params.critics)
    nothing = lambda weights: (jnp.zeros_like(q), jax.tree.map(jnp.zeros_like, weights))
    policy_value, weights = jax.lax.cond(rows.turn, jax.value_and_grad(policy_loss), nothing, params.actor)
    # Metrics are means over minibatches, of which only every `delay`-th has a policy loss.
    metrics = {"critic_loss": critic_value, "policy_loss": sizes.delay * policy_value, "q": q}
    return Params(weights, critics), jnp.sum(rows.weight), Outputs(metrics, rows.turn)


def _apply(learner: Learner, gradient: Params, outputs: Outputs) -> Learner:
    knobs, params, adam = learner.knobs, learner.params, learner.adam
    critics, critic_adam = descend(ADAM, adam.critics, params.critics, gradient.critics, knobs.lr)

    def move():
        actor, actor_adam = descend(ADAM, adam.actor, params.actor, gradient.actor, knobs.lr)
        return actor, actor_adam, follow(learner.target, Params(actor, critics), knobs.tau)

    def stay():
        return params.actor, adam.actor, learner.target

    actor, actor_adam, target = jax.lax.cond(outputs.samples, move, stay)
    return learner._replace(
        params=Params(actor, critics), adam=Params(actor_adam, critic_adam), target=target
    )
