"""Every compiled program of a run: init, chunk, evaluate, select. The only jits of training are here.

Rooms below hold plain functions for one agent. Here they are mapped over lanes, laid over the mesh,
donated and compiled ahead of time, so that compiling is a visible phase and happens once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from shoal.algos import update as one_update
from shoal.algos.update import AgentState, Identity, Metrics
from shoal.errors import ShoalError
from shoal.mesh.layout import AGENT, DATA, Layout
from shoal.ops.parts import parts
from shoal.population import lanes as lanes_of
from shoal.population import pbt
from shoal.population.lanes import contained, identities, stacked
from shoal.population.search import Axis
from shoal.rollout import device
from shoal.rollout.device import Scores
from shoal.types import WHOLE, Agent, Env, Tree


class Recipe(NamedTuple):
    """What a program is made from."""

    agent: Agent
    env: Env
    knobs: Tree  # one agent's, for their structure
    env_params: Tree  # likewise
    num_envs: int  # per agent, over all devices
    num_steps: int  # per env and update
    minibatches: int = 1  # that an update's steps are divided into
    microbatch: int = (
        0  # rows of one on a device whose gradient is computed at a time; 0 = for the layout to say
    )


def abstract_state(recipe: Recipe, layout: Layout) -> AgentState:
    """Shapes, dtypes and shardings of the whole population's state; leaves are led by lanes."""
    state = jax.eval_shape(_init(recipe, layout), *_init_arguments(recipe, layout))
    shardings = jax.tree.map(lambda spec: NamedSharding(layout.mesh, spec), _specs(recipe))
    shardings = jax.tree.broadcast(shardings, state)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def compile_init(recipe: Recipe, layout: Layout) -> Callable[[Identity, Tree, Tree], AgentState]:
    """(identities, knobs, env_params), each led by lanes, → state."""
    return jax.jit(_init(recipe, layout)).lower(*_init_arguments(recipe, layout)).compile()


def compile_chunk(
    recipe: Recipe, layout: Layout
) -> tuple[Callable[[AgentState, np.int32], tuple[AgentState, Metrics]], int]:
    """(state, updates to do) → (state, metrics summed over them [P]). The state given is donated.

    Also the bytes that the program needs on all devices together, 0 where XLA does not say. On a CPU a few
    lanes at a time do all of the updates, so that they stay in its caches; but not where they own a replay,
    of which there would be a second copy.
    """
    rows = recipe.num_envs // layout.data_shards * recipe.num_steps // recipe.minibatches
    at_once = min(rows, recipe.microbatch or rows)

    def chunk(state, updates):
        one = partial(
            one_update.update,
            recipe.agent,
            recipe.env,
            recipe.num_steps,
            axis=layout.axis(),
            cuts=_cuts(recipe, layout),
        )
        step = jax.jit(jax.vmap(contained(one)), inline=True)  # for its trace, which both lines below share

        def some(state):
            _, shapes = jax.eval_shape(step, state)
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def body(_, carried):
                state, total = carried
                state, metrics = step(state)
                return state, jax.tree.map(jnp.add, total, metrics)

            return jax.lax.fori_loop(0, updates, body, (state, nothing))

        lanes = state.identity.active.shape[0]
        blocks = parts(lanes, 0 if jax.tree.leaves(state.learner.replay) else layout.lanes_at_once(at_once))
        if blocks == 1:
            return some(state)
        cut = lambda x: x.reshape(blocks, lanes // blocks, *x.shape[1:])
        joined = lambda x: x.reshape(lanes, *x.shape[2:])
        return jax.tree.map(joined, jax.lax.map(some, jax.tree.map(cut, state)))

    specs = _specs(recipe)
    program = _sharded(layout, chunk, (specs, PartitionSpec()), (specs, PartitionSpec(AGENT)))
    updates = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(program, donate_argnums=0).lower(abstract_state(recipe, layout), updates).compile()
    return compiled, _bytes(compiled) * layout.mesh.size


def _cuts(recipe: Recipe, layout: Layout) -> one_update.Cuts:
    """How a minibatch's rows are divided for its gradient; ShoalError where the microbatch does not fit."""
    if not (most := recipe.microbatch):
        return partial(parts, most=layout.rows_at_once)

    def exact(rows: int) -> int:
        if rows > most and rows % most:
            fit = next(n for n in range(most, 0, -1) if rows % n == 0)
            what = f"does not divide the {rows:,} rows of a minibatch on one device"
            raise ShoalError(f"--microbatch {most} {what}", f"--microbatch {fit}")
        return max(1, rows // most)

    return exact


def compile_selection(
    recipe: Recipe, layout: Layout, axes: tuple[Axis, ...]
) -> Callable[[AgentState, np.int32], tuple[AgentState, pbt.Selection]]:
    """(state, updates of the run) → (state, what was selected [P]). The state given is donated.

    Agents cross devices here, by XLA's own collectives: no other program may be in flight.
    """
    select = lambda state, updates: pbt.select(axes, updates, state)
    updates = jax.ShapeDtypeStruct((), jnp.int32)
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    return _changing(select, recipe, layout, updates, beside=(everywhere,))


def _changing(function: Callable, recipe: Recipe, layout: Layout, *arguments: Any, beside: tuple = ()) -> Any:
    """Compile (state, *arguments) → state, placed as it was and donated.

    `beside` has the shardings of what is returned along with it.
    """
    state = abstract_state(recipe, layout)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    out = (shardings, *beside) if beside else shardings
    return jax.jit(function, donate_argnums=0, out_shardings=out).lower(state, *arguments).compile()


def compile_refill(
    recipe: Recipe, layout: Layout
) -> Callable[[AgentState, np.ndarray, Identity, Tree, Tree], AgentState]:
    """(state, lanes [P], identities, knobs, env_params) → state with fresh agents where `lanes` is True.

    Every agent's episodes are counted anew from here on. The state given is donated.
    """
    fresh = _init(recipe, layout)

    def refill(state, lanes, *arguments):
        return lanes_of.refill(pbt.counted_anew(state), lanes, fresh(*arguments))

    lanes = jax.ShapeDtypeStruct((layout.lanes,), bool)
    return _changing(refill, recipe, layout, lanes, *_init_arguments(recipe, layout))


def compile_scores(recipe: Recipe, layout: Layout) -> Callable[[AgentState], jax.Array]:
    """State → what agents are compared by [P]; see `pbt.scores`. The state is only read."""
    return jax.jit(pbt.scores).lower(abstract_state(recipe, layout)).compile()


def compile_entry(recipe: Recipe, layout: Layout) -> Callable[[AgentState, np.int32, AgentState], AgentState]:
    """(state, lane, newcomer without the lane axis) → state with it in that lane; see `lanes.enter`.

    The state given is donated; whoever shall stay is taken out first, with `lanes.leave`.
    """
    shape = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    newcomer = jax.tree.map(shape, abstract_state(recipe, layout))
    return _changing(lanes_of.enter, recipe, layout, jax.ShapeDtypeStruct((), jnp.int32), newcomer)


def unread(recipe: Recipe) -> tuple[set[str], set[str]]:
    """Names of the knobs, and of the env's params, that a fresh agent's first update does not depend on."""

    def first(identity, knobs, env_params):
        state = one_update.init(recipe.agent, recipe.env, identity, knobs, env_params, recipe.num_envs)
        state, metrics = one_update.update(recipe.agent, recipe.env, recipe.num_steps, state)
        return state._replace(env_params=(), learner=state.learner._replace(knobs=())), metrics

    given = identities(0, 1, 1, 1), stacked(recipe.knobs, 1), stacked(recipe.env_params, 1)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), given)
    jaxpr = jax.make_jaxpr(first)(*shapes).jaxpr
    _, read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    _, knobs, env_params = jax.tree.unflatten(jax.tree.structure(given), read)
    idle = lambda tree: {
        jax.tree_util.keystr(path, simple=True) for path, used in jax.tree.leaves_with_path(tree) if not used
    }
    return idle(knobs), idle(env_params)


def compile_rollout(recipe: Recipe, layout: Layout) -> Callable[[AgentState, np.int32], Tree]:
    """(state, updates) → the rewards of that many rollouts without any learning; the state is only read.

    For profiling: what acting costs of an update.
    """

    def rollouts(state, updates):
        def one(state, number):
            who, envs = state.identity, state.actors.episode_return.shape[0]
            index = one_update.env_index(envs, layout.axis())
            keys = device.rollout_keys(who.seed, who.agent, number, index)
            policy = recipe.agent.policy(state.learner)
            actors, columns, _ = device.collect(
                recipe.agent, recipe.env, policy, state.actors, state.env_params, keys, recipe.num_steps
            )
            return state._replace(actors=actors), jnp.sum(columns["reward"], 0)

        def body(number, carried):
            state, total = carried
            state, reward = jax.vmap(one, (0, None))(state, number)
            return state, total + reward

        nothing = jnp.zeros_like(state.actors.episode_return)
        return jax.lax.fori_loop(0, updates, body, (state, nothing))[1]

    specs = _specs(recipe)
    program = _sharded(layout, rollouts, (specs, PartitionSpec()), PartitionSpec(AGENT, DATA))
    updates = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.jit(program).lower(abstract_state(recipe, layout), updates).compile()


def compile_warm_up(recipe: Recipe, layout: Layout) -> Callable[[AgentState, np.int32], AgentState]:
    """(state, rollouts) → state after acting for so long without learning; the state given is donated."""

    def warm_up(state, rollouts):
        one = partial(one_update.warm_up, recipe.agent, recipe.env, recipe.num_steps, axis=layout.axis())
        return jax.vmap(lambda state: one(state, rollouts))(state)

    specs = _specs(recipe)
    program = _sharded(layout, warm_up, (specs, PartitionSpec()), specs)
    return _changing(program, recipe, layout, jax.ShapeDtypeStruct((), jnp.int32))


def compile_evaluation(
    recipe: Recipe, layout: Layout, episodes: int, max_steps: int, seed: int = 0
) -> Callable[[AgentState], tuple[Scores, Scores]]:
    """State → scores [P, E] of the sampled and of the greedy policy; the state is only read.

    `seed` chooses the episodes, which are the same for every agent.
    """
    split = episodes % layout.data_shards == 0  # else every share of the data axis plays all of them

    def evaluate(state):
        axis = layout.axis() if split else WHOLE
        index = one_update.env_index(episodes // axis.size, axis)

        def one(state, greedy):
            policy = recipe.agent.policy(state.learner)
            arguments = recipe.agent, recipe.env, policy, state.env_params, index
            return device.evaluate(*arguments, max_steps, greedy, seed)

        return tuple(jax.vmap(partial(one, greedy=greedy))(state) for greedy in (False, True))

    out = PartitionSpec(AGENT, DATA) if split else PartitionSpec(AGENT)
    program = _sharded(layout, evaluate, (_specs(recipe),), out)
    return jax.jit(program).lower(abstract_state(recipe, layout)).compile()


def _sharded(layout: Layout, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    return jax.shard_map(function, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _init(recipe: Recipe, layout: Layout) -> Callable:
    here = recipe.num_envs // layout.data_shards

    def init(identity, knobs, env_params):
        one = partial(one_update.init, recipe.agent, recipe.env, envs_here=here, axis=layout.axis())
        return jax.vmap(one)(identity, knobs, env_params)

    return _sharded(layout, init, PartitionSpec(AGENT), _specs(recipe))


def _init_arguments(recipe: Recipe, layout: Layout) -> tuple[Identity, Tree, Tree]:
    lanes = layout.lanes
    return identities(0, lanes, 0, lanes), stacked(recipe.knobs, lanes), stacked(recipe.env_params, lanes)


def _specs(recipe: Recipe) -> Any:
    """Where each part of the state lives: all of it by agent; what is kept per env, by data as well."""
    per_agent: Any = PartitionSpec(AGENT)
    per_env: Any = PartitionSpec(AGENT, DATA)
    learner = jax.eval_shape(recipe.agent.init, jax.random.key(0), recipe.knobs)
    fields = dict.fromkeys(learner._fields, per_agent) | {"local": per_env, "replay": per_env}
    return AgentState(per_agent, per_agent, type(learner)(**fields), per_env, per_agent)


def _bytes(compiled: jax.stages.Compiled) -> int:
    """Per device. `peak_memory_in_bytes` is blind to scan bodies, so the parts are added up."""
    memory = compiled.memory_analysis()
    if memory is None or not memory.temp_size_in_bytes:
        return 0
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes
