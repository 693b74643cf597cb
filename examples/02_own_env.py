"""An environment of your own, trained by naming it: `shoal train 02_own_env:make_env` does the same."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import shoal


class Params(NamedTuple):
    """Knobs: `--env.wind 0.2` on the command line, env_params={"wind": 0.2} in Python."""

    wind: float = 0.1  # how far a gust can push per step
    goal: float = 0.0


class State(NamedTuple):
    position: jax.Array


def reset(key: jax.Array, params: Params) -> tuple[State, jax.Array]:
    position = jax.random.uniform(key, (), minval=-1.0, maxval=1.0)
    return State(position), position[None]


def step(key: jax.Array, state: State, action: jax.Array, params: Params) -> shoal.Step:
    """Move left, stay or move right against the wind; be near the goal. No reset in here: Shoal does it."""
    gust = params.wind * jax.random.uniform(key, (), minval=-1.0, maxval=1.0)
    position = jnp.clip(state.position + 0.1 * (action - 1) + gust, -2.0, 2.0)
    over = jnp.abs(position) >= 2.0
    reward = 1.0 - jnp.abs(position - params.goal)
    return shoal.Step(State(position), position[None], reward, over, jnp.bool_(False), {})


def make_env() -> shoal.Env:
    return shoal.Env(
        name="windy-walk",
        default_params=lambda: shoal.as_arrays(Params()),
        reset=reset,
        step=step,
        obs_space=lambda params: shoal.Box(-2.0, 2.0, (1,)),
        action_space=lambda params: shoal.Discrete(3),
        time_limit=50,
    )


def main(agents: int = 4, steps: int = 50_000, root: str = "runs") -> shoal.Run:
    report = shoal.check_env(make_env())
    assert report.ok, report
    run = shoal.train(make_env, agents=agents, steps=steps, root=root)
    print("returns:", run.returns)
    return run


if __name__ == "__main__":
    main()
