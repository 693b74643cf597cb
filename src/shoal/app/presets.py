"""Settings that solve the built-in envs, and their sources. `shoal bench presets` re-measures them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """What differs from the defaults for one env and algorithm."""

    provenance: str
    train: dict[str, Any] = field(default_factory=dict)
    algo: dict[str, Any] = field(default_factory=dict)


GUESS = "first guess, untuned"

PRESETS: dict[tuple[str, str], Preset] = {
    ("cartpole", "ppo"): Preset("the defaults, as in Huang et al. 2022"),
    ("acrobot", "ppo"): Preset(GUESS, dict(steps=500_000)),
    ("mountaincar", "ppo"): Preset(
        GUESS,
        dict(steps=1_000_000),
        dict(num_envs=16, num_steps=16, gae_lambda=0.98, ent_coef=0.0, normalize_obs=True),
    ),
    ("mountaincar-continuous", "ppo"): Preset(
        GUESS,
        dict(steps=500_000),
        dict(gamma=0.999, ent_coef=0.005, normalize_obs=True, normalize_reward=True),
    ),
    ("pendulum", "ppo"): Preset(
        GUESS,
        dict(steps=500_000),
        dict(lr=1e-3, gamma=0.9, ent_coef=0.0, epochs=10, minibatches=16, normalize_obs=True),
    ),
    ("breakout", "ppo"): Preset(
        GUESS, dict(steps=10_000_000), dict(num_envs=64, hidden=(128,), activation="relu", minibatches=8)
    ),
}
