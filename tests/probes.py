"""Probe environments, each failing for one reason, and small things the tests of many rooms share.

After the ladder in rejax's tests. An algorithm that passes every rung has its signs, indices, masks and
discounts right; one that fails shows by the rung where to look. The ladder is ONE env whose rung is a
knob, so that a population can climb all rungs in one compiled program; `ladder.py` has the tests.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from equinox.debug import assert_max_traces
from jax.sharding import PartitionSpec

from shoal.algos import ppo
from shoal.algos import update as one_update
from shoal.algos.update import AgentState
from shoal.mesh.layout import AGENT, DATA, lay_out
from shoal.nets import net_of
from shoal.population.lanes import contained, identities, stacked
from shoal.types import Agent, Array, Box, Discrete, Env, Key, MultiDiscrete, Step

RUNGS = CONSTANT, SEEING, DELAYED, ACTING, BOTH, LIMITED, FORBIDDEN = range(7)


class Rung(NamedTuple):
    """Which rung, as an array.

    CONSTANT   one observation, reward 1, ends at once: is a value learned at all?
    SEEING     reward = the observation, ±1: does the critic see it?
    DELAYED    reward 1 after three steps, else 0: is it discounted back?
    ACTING     reward 1 for action 1, else 0: does the actor learn?
    BOTH       reward 1 for the action that the observation asks for: does the actor see it?
    LIMITED    reward 1 for ever, cut short every five steps: are truncated episodes bootstrapped?
    FORBIDDEN  action 0 would pay 5 but is masked, 1 pays 1, 2 pays 0: is the mask obeyed and learned with?
    """

    rung: int = CONSTANT


class RungState(NamedTuple):
    cue: Array  # -1 or 1
    time: Array  # steps taken


def ladder(continuous: bool = False) -> Env:
    """Observation [cue, time], each 0 on the rungs that have none; three actions.

    Continuous actions, -1 … 1, mean 0 in the lowest third, 1 in the middle one and 2 in the highest.
    """

    def third(action):
        return jnp.clip(jnp.floor(1.5 * (action[0] + 1)), 0, 2).astype(jnp.int32)

    choose = third if continuous else lambda action: action
    return Env(
        "ladder",
        lambda: Rung(np.int32(CONSTANT)),
        _reset,
        lambda key, state, action, params: _step(key, state, choose(action), params),
        lambda params: Box(-2.0, 2.0, (2,)),
        lambda params: Box(-1.0, 1.0, (1,)) if continuous else Discrete(3),
        action_mask=None
        if continuous
        else lambda state, params: (jnp.arange(3) > 0) | (params.rung != FORBIDDEN),
    )


def _reset(key: Key, params: Rung):
    cue = jnp.where(jax.random.bernoulli(key), 1.0, -1.0).astype(jnp.float32)
    state = RungState(cue, jnp.int32(0))
    return state, _see(state, params)


def _see(state: RungState, params: Rung) -> Array:
    rung = params.rung
    cue = jnp.where((rung == SEEING) | (rung == BOTH), state.cue, 0.0)
    time = jnp.where(rung == DELAYED, state.time.astype(jnp.float32) - 1, 0.0)
    return jnp.stack([cue, time])


def _step(key: Key, state: RungState, action: Array, params: Rung) -> Step:
    state, rung = state._replace(time=state.time + 1), params.rung
    length = jnp.select([rung == DELAYED, rung == LIMITED], [3, 5], 1)
    wanted = jnp.where(state.cue > 0, 1, 2)
    rewards = [
        1.0,
        state.cue,
        state.time == 3,
        action == 1,
        action == wanted,
        1.0,
        jnp.asarray([5.0, 1.0, 0.0])[action],
    ]
    reward = jnp.stack([jnp.asarray(reward, jnp.float32) for reward in rewards])[rung]
    over = state.time >= length
    return Step(state, _see(state, params), reward, over & (rung != LIMITED), over & (rung == LIMITED), {})


# --- Structured spaces ------------------------------------------------------------------------


class Cues(NamedTuple):
    gear: Array  # 0 … 2
    light: Array  # 0 or 1


def structured() -> Env:
    """Dict observation with an image, multi-discrete action: reward is the share of entries that match."""

    def see(state: Cues) -> dict:
        image = jnp.zeros((4, 4, 1), jnp.uint8).at[1:3, 1:3, 0].set((255 * state.light).astype(jnp.uint8))
        return {"gear": state.gear, "image": image}

    def reset(key, params):
        gear_key, light_key = jax.random.split(key)
        gear = jax.random.randint(gear_key, (), 0, 3, jnp.int32)
        state = Cues(gear, jax.random.randint(light_key, (), 0, 2, jnp.int32))
        return state, see(state)

    def step(key, state, action, params):
        match = (action == jnp.stack([state.light, state.gear])).astype(jnp.float32)
        return Step(state, see(state), jnp.mean(match), jnp.bool_(True), jnp.bool_(False), {})

    obs_space = {"gear": Discrete(3), "image": Box(0, 255, (4, 4, 1), np.uint8)}
    return Env(
        "structured", tuple, reset, step, lambda params: obs_space, lambda params: MultiDiscrete((2, 3))
    )


def target() -> Env:
    """Continuous: put the action, 0 … 4, where the observation asks, at 1 or 3; reward is minus the distance.

    Observation and reward come in awkward units, so that normalising them matters.
    """

    def see(state):
        return jnp.stack([1000.0 + 50.0 * state, 0.01 * state])

    def reset(key, params):
        state = jnp.where(jax.random.bernoulli(key), 1.0, -1.0).astype(jnp.float32)
        return state, see(state)

    def step(key, state, action, params):
        reward = -100.0 * jnp.abs(action[0] - (2 + state))
        return Step(state, see(state), reward, jnp.bool_(True), jnp.bool_(False), {})

    return Env(
        "target",
        tuple,
        reset,
        step,
        lambda params: Box(-np.inf, np.inf, (2,)),
        lambda params: Box(0.0, 4.0, (1,)),
    )


# --- A world where everything is random ------------------------------------------------------


class Walk(NamedTuple):
    """Params."""

    p_end: float = 0.15  # chance of a termination, per step
    p_cut: float = 0.15  # chance of a truncation; both may come at once


class WalkState(NamedTuple):
    x: Array
    time: Array  # steps since the reset


def walk(time_limit: int = 6, continuous: bool = False) -> Env:
    """Start, reward, ends and mask all depend on keys or state: a driver that loses one of them shows.

    Continuous actions lie in 0 … 2 and are never masked.
    """

    def see(state):
        return jnp.stack([state.x, state.time.astype(jnp.float32)])

    def reset(key, params):
        state = WalkState(jax.random.normal(key, (), jnp.float32), jnp.int32(0))
        return state, see(state)

    def step(key, state, action, params):
        push, end, cut = jax.random.uniform(key, (3,), jnp.float32)
        action = action[0] if continuous else action
        state = WalkState(state.x + push * (action - 1), state.time + 1)
        return Step(state, see(state), state.x + action, end < params.p_end, cut < params.p_cut, {})

    return Env(
        "walk",
        lambda: Walk(np.float32(0.15), np.float32(0.15)),
        reset,
        step,
        lambda params: Box(-np.inf, np.inf, (2,)),
        lambda params: Box(0.0, 2.0, (1,)) if continuous else Discrete(3),
        time_limit=time_limit,
        action_mask=None
        if continuous
        else lambda state, params: jnp.arange(3) != (state.time + (state.x > 0)) % 3,
    )


# --- Small training programs ------------------------------------------------------------------


def agent_for(env: Env, algo: Any, sizes: Any) -> Agent:
    """An agent of the algorithm in module `algo`, with the house's networks."""
    params = env.default_params()
    return algo.make(env.obs_space(params), env.action_space(params), sizes, net_of("auto", sizes))


def train(env: Env, algo: Any, sizes: Any, knobs: Any, updates: int, lanes: int, params=None):
    """A population trained in one program: its last state, and the metrics of each update [U, P]."""
    agent = agent_for(env, algo, sizes)
    init = jax.vmap(partial(one_update.init, agent, env, envs_here=sizes.num_envs))
    step = jax.vmap(partial(one_update.update, agent, env, sizes.num_steps))

    def run(*start):
        return jax.lax.scan(lambda state, _: step(state), init(*start), None, updates)

    params = stacked(env.default_params(), lanes) if params is None else params
    return jax.jit(run)(identities(0, lanes, updates, lanes), stacked(knobs, lanes), params)


def alone(env: Env, algo: Any, sizes: Any, knobs: Any) -> AgentState:
    """A fresh agent, as a population of one."""
    init = jax.vmap(partial(one_update.init, agent_for(env, algo, sizes), env, envs_here=sizes.num_envs))
    return jax.jit(init)(identities(0, 1, BUDGET, 1), stacked(knobs, 1), stacked(env.default_params(), 1))


def wide(state: AgentState) -> AgentState:
    """The state in float64, but for what the update number becomes; x64 has to be on."""
    doubled = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, state)
    if "progress" not in state.learner._fields:
        return doubled
    return doubled._replace(learner=doubled.learner._replace(progress=state.learner.progress))


def placed(env: Env, algo: Any, sizes: Any, state: AgentState, shards: int, updates: int = 3):
    """State and metrics of one agent after `updates`, its envs split over `shards` devices."""
    layout, agent = lay_out(tuple(jax.devices()[:shards]), 1, sizes.strata), agent_for(env, algo, sizes)
    assert layout.data_shards == shards
    lanes, envs = PartitionSpec(AGENT), PartitionSpec(AGENT, DATA)
    fields = dict.fromkeys(state.learner._fields, lanes) | {"local": envs, "replay": envs}
    learner = type(state.learner)(**fields)
    where = AgentState(**dict.fromkeys(state._fields, lanes) | {"learner": learner, "actors": envs})

    def run(state):
        one = jax.vmap(partial(one_update.update, agent, env, sizes.num_steps, axis=layout.axis()))
        return jax.lax.scan(lambda state, _: one(state), state, None, updates)

    out = where, PartitionSpec(None, AGENT)
    program = jax.shard_map(run, mesh=layout.mesh, in_specs=(where,), out_specs=out, check_vma=False)
    return jax.block_until_ready(jax.jit(program)(state))


TINY = ppo.Sizes(
    num_envs=4,
    num_steps=8,
    epochs=2,
    minibatches=2,
    hidden=(8,),
    normalize_obs=True,
    normalize_reward=True,
)
LANES, BUDGET = 4, 100


class Tiny(NamedTuple):
    """PPO on the random walk, every option on, four lanes; compiled once for all tests of a process."""

    agent: Agent
    env: Env
    init: Callable  # (identities, knobs, params), each [P] -> state
    step: Callable  # state -> (state, metrics), masked and contained
    alone: Callable  # the plain update of one agent, without a population


@cache
def tiny() -> Tiny:
    env = walk()
    agent = agent_for(env, ppo, TINY)
    update = partial(one_update.update, agent, env, TINY.num_steps)
    once = assert_max_traces(max_traces=1)
    return Tiny(
        agent,
        env,
        jax.jit(once(jax.vmap(partial(one_update.init, agent, env, envs_here=TINY.num_envs)))),
        jax.jit(once(jax.vmap(contained(update)))),
        jax.jit(once(update)),
    )


def knobs(**changed) -> ppo.Knobs:
    """Four lanes' knobs; a list gives each lane its own."""
    values = ppo.Knobs()._replace(lr=1e-2)._replace(**changed)
    return ppo.Knobs(*(jnp.broadcast_to(jnp.asarray(x, jnp.float32), (LANES,)) for x in values))


def start(knobs: ppo.Knobs, seed: int = 0):
    """Four fresh agents."""
    params = stacked(tiny().env.default_params(), LANES)
    return tiny().init(identities(seed, LANES, BUDGET, LANES), knobs, params)


def lane(tree, i: int):
    return jax.tree.map(lambda x: x[i], tree)
