"""One update of one agent, the same for every algorithm: roll out, prepare, then grad → reduce → apply.

The reduction is the one place where shares of a minibatch meet, so every split of it over devices gives
the same gradient: numerators and counts are added up, and divided once.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from shoal.ops.statistics import Moments
from shoal.rollout import device
from shoal.rollout.device import Actors, Episodes, choose, no_episodes, spread
from shoal.rollout.streams import INIT, LEARN, stream
from shoal.types import WHOLE, Agent, Array, Axis, Batch, Env, Outputs, Tree


class Identity(NamedTuple):
    """Who an agent is. Copying one agent onto another leaves the receiver's identity as it was."""

    seed: Array  # uint32
    agent: Array  # int32 id within the run
    updates: Array  # int32 done so far
    budget: Array  # int32 updates to do in total; 0 where a lane has no agent
    active: Array  # bool; False once frozen, or where a lane has no agent


class AgentState(NamedTuple):
    """All there is of an agent. Saving and loading it continues the run bit for bit."""

    identity: Identity
    env_params: Tree  # the env's knobs
    learner: Tree
    actors: Actors
    episodes: Episodes  # ended since agents were last compared; a run that never compares counts them all


Metrics = dict[str, Array]  # sums over updates; the host divides
Cuts = Callable[[int], int]  # rows of a minibatch -> parts of equal size to compute its gradient in
uncut: Cuts = lambda rows: 1


def env_index(envs_here: int, axis: Axis) -> Array:
    """Global numbers of the envs on this share of the data axis, int32 [B here]."""
    return jnp.int32(axis.index) * envs_here + jnp.arange(envs_here, dtype=jnp.int32)


def init(
    agent: Agent,
    env: Env,
    identity: Identity,
    knobs: Tree,
    env_params: Tree,
    envs_here: int,
    axis: Axis = WHOLE,
) -> AgentState:
    """A fresh agent with `envs_here` envs on this share of the data axis."""
    learner = agent.init(stream(identity.seed, identity.agent, INIT), knobs)
    learner = learner._replace(
        local=spread(learner.local, envs_here), replay=spread(learner.replay, envs_here)
    )
    key = device.reset_key(identity.seed, identity.agent)
    actors = device.start(agent, env, env_params, key, env_index(envs_here, axis))
    return AgentState(identity, env_params, learner, actors, no_episodes())


def update(
    agent: Agent, env: Env, num_steps: int, state: AgentState, axis: Axis = WHOLE, cuts: Cuts = uncut
) -> tuple[AgentState, Metrics]:
    """T steps of every env and all minibatches of learning from them.

    A minibatch's gradient is computed in as many parts as `cuts` makes of its rows.
    """
    identity, learner = state.identity, state.learner
    index = env_index(state.actors.episode_return.shape[0], axis)
    keys = device.rollout_keys(identity.seed, identity.agent, identity.updates, index)
    env_keys, local_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    actors, columns, episodes = device.collect(
        agent, env, agent.policy(learner), state.actors, state.env_params, env_keys, num_steps
    )
    batch = Batch(
        **columns,
        carry=state.actors.carry,
        keys=local_keys,
        key=stream(identity.seed, identity.agent, LEARN, identity.updates),
        progress=identity.updates.astype(jnp.float32) / jnp.maximum(identity.budget, 1),
    )
    learner, data, rows = agent.prepare(learner, batch, axis)

    def minibatch(learner, rows):
        numerator, count, outputs = summed_gradient(agent, learner, data, rows, cuts)
        numerator, count, sums = _reduce((numerator, count, outputs.metrics), axis)
        gradient = jax.tree.map(lambda total: total / jnp.maximum(count, 1), numerator)
        metrics = {name: total / jnp.maximum(count, 1) for name, total in sums.items()}
        applied = agent.apply(learner, gradient, outputs._replace(metrics=metrics))
        return choose(count > 0, applied, learner), metrics

    learner, learned = jax.lax.scan(minibatch, learner, rows)
    metrics = {name: jnp.mean(column) for name, column in learned.items()}
    episodes = axis.sum(episodes)
    metrics |= dict(
        updates=jnp.ones((), jnp.float32),
        episodes=episodes.count,
        return_sum=episodes.return_sum,
        length_sum=episodes.length_sum,
    )
    identity = identity._replace(updates=identity.updates + 1)
    total = jax.tree.map(lambda old, new: old + new.astype(old.dtype), state.episodes, episodes)
    return AgentState(identity, state.env_params, learner, actors, total), metrics


def warm_up(
    agent: Agent, env: Env, num_steps: int, state: AgentState, rollouts: Array, axis: Axis = WHOLE
) -> AgentState:
    """That many updates without a gradient step: only the running statistics move, and what is kept per env.

    They count as no updates, and are numbered -rollouts … -1, so that they draw what no update draws again.
    """

    def prepare(learner, batch, axis):
        learner, data, rows = agent.prepare(learner, batch, axis)
        return learner, data, jax.tree.map(lambda x: x[:0], rows)  # no minibatches

    def one(number, state):
        numbered = state._replace(identity=state.identity._replace(updates=number - rollouts))
        after, _ = update(agent._replace(prepare=prepare), env, num_steps, numbered, axis)
        moved = {name: getattr(after.learner, name) for name in ("local", *statistics(state.learner))}
        return state._replace(learner=state.learner._replace(**moved), actors=after.actors)

    return jax.lax.fori_loop(0, rollouts, one, state)


def freeze(agent: Agent, frozen: Tree) -> Agent:
    """The agent with parameters that no update changes: `frozen` has a bool for each of `learner.params`.

    Their gradient is zero, so that they have no part in its norm, and no step of any optimiser moves them.
    """

    def still(gradient):
        return jax.tree.map(lambda held, x: jnp.zeros_like(x) if held else x, frozen, gradient)

    def grad(*given):
        numerator, count, outputs = agent.grad(*given)
        return still(numerator), count, outputs

    def apply(learner, *given):
        after = agent.apply(learner, *given)
        kept = jax.tree.map(lambda held, old, new: old if held else new, frozen, learner.params, after.params)
        return after._replace(params=kept)

    return agent._replace(grad=grad, apply=apply)


def statistics(learner: Tree) -> list[str]:
    """The fields of a learner that are running statistics."""
    return [name for name in learner._fields if isinstance(getattr(learner, name), Moments)]


def summed_gradient(
    agent: Agent, learner: Tree, data: Tree, rows: Tree, cuts: Cuts = uncut
) -> tuple[Tree, Array, Outputs]:
    """`agent.grad` over all rows [n, …], as the sum over parts of equal size.

    Numerators and counts are sums, so that every split gives the same gradient. A leaf of rows or samples
    without a row axis is the same for all parts.
    """
    number = max((x.shape[0] for x in jax.tree.leaves(rows) if x.ndim), default=1)
    if (blocks := cuts(number)) == 1:
        return agent.grad(learner, data, rows)
    each = number // blocks
    cut = lambda x: x.reshape(blocks, each, *x.shape[1:]) if x.ndim else jnp.broadcast_to(x, blocks)
    split = jax.tree.map(cut, rows)

    def some(rows):
        numerator, count, outputs = agent.grad(learner, data, rows)
        return (numerator, count, outputs.metrics), outputs.samples

    def add(total, rows):
        sums, samples = some(rows)
        return jax.tree.map(jnp.add, total, sums), samples

    shapes, _ = jax.eval_shape(some, jax.tree.map(lambda x: x[0], split))
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (numerator, count, metrics), samples = jax.lax.scan(add, nothing, split)
    joined = lambda x: x.reshape(number, *x.shape[2:]) if x.ndim > 1 else x[-1]
    return numerator, count, Outputs(metrics, jax.tree.map(joined, samples))


def _reduce(tree: Tree, axis: Axis) -> Tree:
    """The sum over the data axis in one collective: XLA's CPU backend does not merge one per leaf."""
    if axis.size == 1:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(axis.sum(flat))
