"""An evolution strategy (Salimans et al. 2017, arXiv:1703.03864) with low-rank perturbations of the weights.

One update is a generation: every env runs the policy with a perturbation of its own, and the parameters move
along the perturbations weighted by the centred ranks of their returns (their algorithm 1, section 2.1), with
Adam. A weight matrix is perturbed by an outer product of two random vectors (Sarkar et al. 2025,
arXiv:2511.16652, rank 1), so that all envs share one product: y = W x + b + sigma (u (v . x) + w).
Entries of u, v and w are signs, a random bit each, as in Spall's SPSA (1992), and come from two words per
env; so none is ever stored, but made anew by `act` and `grad`.
An env takes on a perturbation at the start of an episode and keeps it to the episode's end, in later
generations if need be: returns are always those of whole episodes under one perturbation. What is different
by then is the mean, which has moved on. Envs that end no episode in a generation have no say in it.
Left out: mirrored pairs (envs do not know of each other; ranks already take out the baseline), virtual batch
normalisation, and networks other than the house's mlp, whose layers are known.
"""

from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from shoal.errors import LARGEST, ShoalError, check_counts
from shoal.nets import ACTIVATIONS, NetMaker, check_layers, house_net
from shoal.nets.inputs import vector
from shoal.nets.mlp import Layers, forward
from shoal.ops.descent import descend
from shoal.ops.distributions import distribution
from shoal.types import Agent, Array, Axis, Batch, Key, Net, Outputs, Space, Tree

NEEDS = "any action space; an mlp"


class Knobs(NamedTuple):
    """Hyper-parameters that may differ per agent and change without recompiling."""

    lr: float = 0.03  # Adam's step size, at the start where annealed
    sigma: float = 0.05  # what is added to, or taken from, every parameter of an env's policy


RANGES = {"lr": (0.0, LARGEST), "sigma": (0.0, LARGEST)}  # what a knob may be, both ends included
SEARCH = {"lr": "log:1e-3..1e-1", "sigma": "log:1e-2..3e-1"}  # worth a search where none is named


@dataclass(frozen=True)
class Sizes:
    """Settings that shape the program."""

    num_envs: int = 64  # perturbations per agent and generation
    num_steps: int = 64  # per env and generation
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    anneal: bool = True  # lr falls linearly to 0 over the budget

    def __post_init__(self) -> None:
        check_counts("es", vars(self), "num_envs", "num_steps")
        if self.num_envs < 2:
            raise ShoalError("--es.num_envs 1 leaves nothing to compare", "use 2 or more, best 32 and up")
        check_layers(self.hidden, self.activation)

    @property
    def strata(self) -> int:
        """Groups that an agent's envs may be divided into: each env stands for itself."""
        return self.num_envs


class Local(NamedTuple):
    """Per env."""

    episode_return: Array  # so far


class Learner(NamedTuple):
    knobs: Knobs
    params: Layers  # the mean
    adam: optax.OptState
    progress: Array  # share of the budget spent, as of the last rollout
    local: Local
    replay: Tree = ()


class Policy(NamedTuple):
    params: Layers
    sigma: Array


class Carry(NamedTuple):
    """Per env: the perturbation of the episode that is under way."""

    seed: Array  # uint32 [2]
    begun: Array  # bool


class Signs(NamedTuple):
    """A perturbation of one linear layer: u v' of its weights and w of its biases, all ±1."""

    u: Array  # [..., outputs]
    v: Array  # [..., inputs]
    w: Array  # [..., outputs]


class Rows(NamedTuple):
    """[1, n] perturbations that ended an episode; those that did not weigh nothing"""

    seed: Array
    lead: Array  # how many others it beats, less how many beat it: a centred rank, as a whole number
    scale: Array  # [1] that makes centred ranks, -1/2 … 1/2, of leads
    fitness: Array
    valid: Array  # 1 or 0


def make(obs_space: Space, action_space: Space, sizes: Sizes, net: NetMaker) -> Agent:
    """An evolution strategy for any action space, acting by the distribution's mode."""
    dist = distribution(action_space)
    mean = _mlp(net, obs_space, dist.size)

    def init(key: Key, knobs: Knobs) -> Learner:
        params, zero = mean.init(key), jnp.zeros((), jnp.float32)
        return Learner(knobs, params, ADAM.init(params), zero, Local(zero))

    def policy(learner: Learner) -> Policy:
        return Policy(learner.params, jnp.asarray(learner.knobs.sigma))

    def carry() -> Carry:
        return Carry(jnp.zeros((2,), jnp.uint32), jnp.zeros((), bool))

    def noise(key: Key, steps: int) -> Array:
        return jnp.broadcast_to(jax.random.bits(key, (2,), jnp.uint32), (steps, 2))

    def act(policy: Policy, carry: Carry, obs: Tree, mask: Tree, noise: Tree):
        x = vector(obs_space, obs)
        if noise is None:
            outputs = forward(policy.params, x, sizes.activation)
        else:
            carry = Carry(jnp.where(carry.begun[:, None], carry.seed, noise), jnp.ones_like(carry.begun))
            outputs = _perturbed(policy, carry.seed, x, sizes.activation)
        sample = dist.sample(outputs, dist.free, mask, None)
        return carry, dist.action(sample), {"seed": carry.seed}

    def prepare(learner: Learner, batch: Batch, axis: Axis):
        return _prepare(learner, batch, axis)

    def grad(learner: Learner, data: Tree, rows: Rows):
        return _grad(learner, rows)

    def apply(learner: Learner, gradient: Layers, outputs: Outputs) -> Learner:
        knobs = learner.knobs
        lr = knobs.lr * (1 - learner.progress) if sizes.anneal else knobs.lr
        params, adam = descend(ADAM, learner.adam, learner.params, gradient, lr)
        return learner._replace(params=params, adam=adam)

    return Agent(init, policy, carry, noise, act, prepare, grad, apply)


ADAM = optax.scale_by_adam()


def _mlp(net: NetMaker, obs_space: Space, outputs: int) -> Net:
    """The house's mlp, or ShoalError: of another network it isn't known where its weights go."""
    made = Net(*net(obs_space, outputs, 0.01))
    ours = getattr(net, "__code__", None) is house_net("mlp", (), "tanh").__code__  # type: ignore[attr-defined]
    layers = jax.eval_shape(made.init, jax.random.key(0))
    if not ours or not all(isinstance(layer, eqx.nn.Linear) for layer in layers):
        raise ShoalError("es perturbs the layers of the house's mlp, and no other network", "use --net mlp")
    return made


# --- Perturbations ----------------------------------------------------------------------------


def _signs(layers: Layers, seed: Array) -> list[Signs]:
    """A seed's perturbation, [2] -> leaves [units]; every layer's in order, a bit each."""
    shapes = [layer.weight.shape for layer in layers]
    total = sum(2 * outputs + inputs for outputs, inputs in shapes)
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    words = jax.random.bits(key, (-(-total // 32),), jnp.uint32)
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    signs, parts = 2 * bits.astype(jnp.float32).ravel() - 1, []
    for outputs, inputs in shapes:
        part, signs = jnp.split(signs, [2 * outputs + inputs])
        parts.append(Signs(*jnp.split(part, [outputs, outputs + inputs])))
    return parts


def _perturbed(policy: Policy, seed: Array, x: Array, activation: str) -> Array:
    """[B, inputs] -> [B, outputs], each row through a network of its own: seed is [B, 2]."""
    signs = jax.vmap(lambda seed: _signs(policy.params, seed))(seed)
    for i, (layer, (u, v, w)) in enumerate(zip(policy.params, signs)):
        along = jnp.sum(v * x, -1, keepdims=True)
        x = x @ layer.weight.T + layer.bias + policy.sigma * (u * along + w)
        x = ACTIVATIONS[activation](x) if i + 1 < len(signs) else x
    return x


# --- Targets ----------------------------------------------------------------------------------


def _prepare(learner: Learner, batch: Batch, axis: Axis):
    """Centred ranks of all perturbations that ended an episode in this rollout, on any share.

    An env has up to two: the one it came with, which ends with the first episode to end, and the one it
    takes on then, whose fitness is the mean of all its whole episodes.
    """
    ended = batch.terminated | batch.truncated
    ends = jnp.sum(ended, 0, dtype=jnp.int32)  # [B]
    before = jnp.cumsum(ended, 0, dtype=jnp.int32) - ended  # episodes that ended before each step [T, B]
    total = lambda rows: jnp.sum(jnp.where(rows, batch.reward, 0.0), 0)
    first = learner.local.episode_return + total((before == 0) & (ends > 0))
    later = total((before > 0) & (before < ends)) / jnp.maximum(ends - 1, 1)
    open_return = total(before == ends) + jnp.where(ends > 0, 0.0, learner.local.episode_return)

    seed = batch.extras["seed"]
    seed = jnp.concatenate([seed[0], seed[-1]])
    fitness = jnp.concatenate([first, later])
    valid = jnp.concatenate([ends > 0, ends > 1])
    lead, scale = _centred_ranks(fitness, valid, axis)
    rows = Rows(seed, lead, scale, jnp.where(valid, fitness, 0.0), valid.astype(jnp.float32))
    learner = learner._replace(progress=batch.progress, local=Local(open_return))
    return learner, (), jax.tree.map(lambda x: x[None], rows)


def _centred_ranks(fitness: Array, valid: Array, axis: Axis) -> tuple[Array, Array]:
    """Leads [n] among the valid entries of all shares, and their scale []; equals share a rank.

    By comparing all with all: for some hundred entries this is less than a sort, and exact on any share.
    """
    mine = jnp.stack([jnp.where(valid, fitness, 0.0), valid.astype(fitness.dtype)])  # [2, n]
    shares = jnp.zeros((axis.size, *mine.shape), mine.dtype).at[axis.index].set(mine)
    everyone, counts = axis.sum(shares).swapaxes(0, 1).reshape(2, -1)
    lead = jnp.sum(jnp.sign(fitness[:, None] - everyone) * counts, 1)
    return jnp.where(valid, lead, 0.0), 0.5 / jnp.maximum(jnp.sum(counts) - 1, 1)


# --- Gradient ---------------------------------------------------------------------------------


def _grad(learner: Learner, rows: Rows):
    """Minus each perturbation times its rank, summed. Their 1 / sigma is left out: Adam knows no scale.

    Sums of whole numbers are exact: where perturbations cancel, they do so on any number of devices, and Adam
    does not make a step of what rounding leaves.
    """
    signs = jax.vmap(lambda seed: _signs(learner.params, seed))(rows.seed)
    lead = rows.lead[:, None]

    def slope(layer, part):
        u, v, w = part
        both = -rows.scale * ((lead * u).T @ v), -rows.scale * jnp.sum(lead * w, 0)
        return eqx.tree_at(lambda m: (m.weight, m.bias), layer, both)

    gradient = tuple(slope(layer, part) for layer, part in zip(learner.params, signs))
    return gradient, jnp.sum(rows.valid), Outputs({"fitness": jnp.sum(rows.fitness)})
