"""The functional core in your own jit and vmap: no run folder, no loop but yours.

An agent is a tuple of pure functions; `shoal.init` and `shoal.update` are the whole of learning for one
agent. Here eight agents with different learning rates are one program under your own vmap.
"""

from functools import partial

import jax
import jax.numpy as jnp

import shoal


def main(agents: int = 8, updates: int = 100) -> jax.Array:
    env = shoal.make_env("cartpole")
    params = jax.tree.map(jnp.asarray, env.default_params())
    agent, knobs, sizes = shoal.make_agent("ppo", env.obs_space(params), env.action_space(params), num_envs=8)

    def one(number: jax.Array, lr: jax.Array) -> jax.Array:
        """Train one agent from scratch; returns its mean return over the episodes of the last ten updates."""
        who = shoal.Identity(
            seed=jnp.uint32(0),
            agent=number,
            updates=jnp.int32(0),
            budget=jnp.int32(updates),
            active=jnp.bool_(True),
        )
        mine = jax.tree.map(jnp.float32, knobs)._replace(lr=lr)
        state = shoal.init(agent, env, who, mine, params, sizes.num_envs)
        step = lambda state, _: partial(shoal.update, agent, env, sizes.num_steps)(state)
        _, metrics = jax.lax.scan(step, state, length=updates)
        return metrics["return_sum"][-10:].sum() / metrics["episodes"][-10:].sum()

    rates = jnp.geomspace(1e-4, 1e-2, agents)
    returns = jax.jit(jax.vmap(one))(jnp.arange(agents), rates)
    for rate, score in zip(rates, returns):
        print(f"lr {rate:.1e}: return {score:.0f} in the last ten updates")
    return returns


if __name__ == "__main__":
    main()
