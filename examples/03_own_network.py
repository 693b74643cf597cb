"""A network of your own: any (init, apply) pair, from flax, Equinox, haiku or, as here first, plain JAX.

From the command line: `shoal train cartpole --net 03_own_network:make_plain`.
"""

import jax
import jax.numpy as jnp

import shoal


def make_plain(obs_space: shoal.Box, outputs: int, scale: float) -> shoal.Net:
    """One hidden layer of 32, written out. `scale` is meant for the last layer: small for a first policy."""
    inputs = obs_space.shape[0]

    def init(key):
        first, last = jax.random.split(key)
        return {
            "first": jax.random.normal(first, (inputs, 32)) / jnp.sqrt(inputs),
            "last": scale * jax.random.normal(last, (32, outputs)) / jnp.sqrt(32),
        }

    def apply(params, obs):  # obs [B, inputs] -> [B, outputs]
        return jnp.tanh(obs @ params["first"]) @ params["last"]

    return shoal.Net(init, apply)


def make_flax(obs_space: shoal.Box, outputs: int, scale: float) -> shoal.Net:
    """The same in flax."""
    import flax.linen as nn

    last = nn.initializers.variance_scaling(scale**2 + 1e-8, "fan_in", "normal")
    module = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(outputs, kernel_init=last)])
    return shoal.Net(lambda key: module.init(key, jnp.zeros((1, *obs_space.shape))), module.apply)


def main(make=make_plain, agents: int = 4, steps: int = 100_000, root: str = "runs") -> shoal.Run:
    run = shoal.train("cartpole", net=make, agents=agents, steps=steps, ppo={"lr": 1e-3}, root=root)
    print("returns:", run.returns)
    return run


if __name__ == "__main__":
    main()
