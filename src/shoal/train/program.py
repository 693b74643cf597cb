"""Every compiled program of a run: init, chunk, evaluate. The only jits of training are here.

Rooms below hold plain functions for one agent. Here they are mapped over lanes, laid over the mesh,
donated and compiled ahead of time, so that compiling is a visible phase and happens once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shoal.algos import update as one_update
from shoal.algos.update import AgentState, Identity, Metrics
from shoal.mesh.layout import AGENT, DATA, Layout
from shoal.population.lanes import contained, identities, stacked
from shoal.rollout import device
from shoal.rollout.device import Scores
from shoal.types import Agent, Env, Tree


class Recipe(NamedTuple):
    """What a program is made from."""

    agent: Agent
    env: Env
    knobs: Tree  # one agent's, for their structure
    env_params: Tree  # likewise
    num_envs: int  # per agent, over all devices
    num_steps: int  # per env and update


class Programs(NamedTuple):
    """Compiled functions over a whole population; leaves are led by lanes."""

    init: Callable[[Identity, Tree, Tree], AgentState]  # (identities, knobs, env_params)
    chunk: Callable[[AgentState, jax.Array], tuple[AgentState, Metrics]]  # (state, updates to do)
    state: AgentState  # shapes, dtypes and shardings of the state
    bytes: int  # that the larger of the two needs, on all devices together; 0 = unknown


def compile_training(recipe: Recipe, layout: Layout) -> Programs:
    """The two programs of a training run, each compiled once. The state given to `chunk` is donated."""
    specs, lanes = _specs(recipe), PartitionSpec(AGENT)
    here = recipe.num_envs // layout.data_shards
    sharded = partial(jax.shard_map, mesh=layout.mesh, check_vma=False)

    def init(identity, knobs, env_params):
        one = partial(one_update.init, recipe.agent, recipe.env, envs_here=here, axis=layout.axis())
        return jax.vmap(one)(identity, knobs, env_params)

    def chunk(state, updates):
        one = partial(one_update.update, recipe.agent, recipe.env, recipe.num_steps, axis=layout.axis())
        step = jax.vmap(contained(one))
        _, shapes = jax.eval_shape(step, state)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def body(_, carried):
            state, total = carried
            state, metrics = step(state)
            return state, jax.tree.map(jnp.add, total, metrics)

        return jax.lax.fori_loop(0, updates, body, (state, nothing))

    inputs = jax.eval_shape(
        lambda: (
            identities(0, layout.agents, 0, layout.lanes),
            stacked(recipe.knobs, layout.lanes),
            stacked(recipe.env_params, layout.lanes),
        )
    )
    make = jax.jit(sharded(init, in_specs=lanes, out_specs=specs)).lower(*inputs).compile()
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        make.out_info,
        make.output_shardings,
    )
    step = jax.jit(
        sharded(chunk, in_specs=(specs, PartitionSpec()), out_specs=(specs, lanes)), donate_argnums=0
    )
    step = step.lower(state, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    return Programs(make, step, state, _bytes(step) * layout.mesh.size)


def compile_evaluation(
    recipe: Recipe, layout: Layout, state: AgentState, episodes: int, max_steps: int
) -> Callable[[AgentState], tuple[Scores, Scores]]:
    """State → scores [P, E] of the sampled and of the greedy policy; the state is only read."""
    shards = layout.data_shards if episodes % layout.data_shards == 0 else 1
    number = episodes // shards

    def evaluate(state):
        first = layout.axis().index * number if shards > 1 else 0
        index = first + jnp.arange(number, dtype=jnp.int32)

        def one(state, greedy):
            policy = recipe.agent.policy(state.learner)
            arguments = recipe.agent, recipe.env, policy, state.env_params, index
            return device.evaluate(*arguments, max_steps, greedy)

        return tuple(jax.vmap(partial(one, greedy=greedy))(state) for greedy in (False, True))

    out = PartitionSpec(AGENT, DATA) if shards > 1 else PartitionSpec(AGENT)
    specs = _specs(recipe)
    program = jax.shard_map(evaluate, mesh=layout.mesh, in_specs=(specs,), out_specs=out, check_vma=False)
    return jax.jit(program).lower(state).compile()


def _specs(recipe: Recipe) -> AgentState:
    """Where each part of the state lives: all of it by agent; what is kept per env, by data as well."""
    per_agent, per_env = PartitionSpec(AGENT), PartitionSpec(AGENT, DATA)
    learner = jax.eval_shape(recipe.agent.init, jax.random.key(0), recipe.knobs)
    fields = dict.fromkeys(learner._fields, per_agent) | {"local": per_env}
    return AgentState(per_agent, per_agent, type(learner)(**fields), per_env)


def _bytes(compiled: jax.stages.Compiled) -> int:
    """Per device. `peak_memory_in_bytes` is blind to scan bodies, so the parts are added up."""
    memory = compiled.memory_analysis()
    if memory is None or not memory.temp_size_in_bytes:
        return 0
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes
