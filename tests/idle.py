"""CartPole with a param that changes nothing."""

from typing import NamedTuple

from shoal.envs import cartpole


class Params(NamedTuple):
    length: float = 1.0


def make():
    env = cartpole.make()
    inner = env.default_params()
    return env._replace(
        default_params=Params,
        reset=lambda key, params: env.reset(key, inner),
        step=lambda key, state, action, params: env.step(key, state, action, inner),
        obs_space=lambda params: env.obs_space(inner),
        action_space=lambda params: env.action_space(inner),
        render=None,
    )
