"""Settings for the built-in envs, and where they come from. `shoal bench presets` measures what each scores.

`bench/results/presets.md` has the scores of PPO's.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """What differs from the defaults for one env and algorithm."""

    provenance: str
    train: dict[str, Any] = field(default_factory=dict)
    algo: dict[str, Any] = field(default_factory=dict)


OURS = "tuned for this project by hand, eight seeds a try"

PRESETS: dict[tuple[str, str], Preset] = {
    ("cartpole", "ppo"): Preset("the defaults: CleanRL's PPO (Huang et al. 2022)"),
    ("acrobot", "ppo"): Preset("the defaults: CleanRL's PPO (Huang et al. 2022)"),
    ("mountaincar", "ppo"): Preset(
        f"{OURS}, from RL Zoo's: many envs, normalisation, gae_lambda 0.98",
        dict(steps=1_000_000),
        dict(
            num_envs=16,
            minibatches=8,
            lr=1e-3,
            gae_lambda=0.98,
            normalize_obs=True,
            normalize_reward=True,
        ),
    ),
    ("mountaincar-continuous", "ppo"): Preset(
        f"{OURS}: a long horizon and normalised rewards make up for missing exploration noise",
        dict(),
        dict(
            num_envs=8,
            num_steps=256,
            epochs=10,
            minibatches=8,
            lr=3e-4,
            gamma=0.999,
            normalize_obs=True,
            normalize_reward=True,
        ),
    ),
    ("pendulum", "ppo"): Preset(
        f"{OURS}, from RL Zoo's: ten epochs, lr 1e-3, no entropy bonus",
        dict(),
        dict(
            num_envs=8,
            epochs=10,
            minibatches=8,
            lr=1e-3,
            gamma=0.97,
            ent_coef=0.0,
            normalize_obs=True,
            normalize_reward=True,
        ),
    ),
    ("breakout", "ppo"): Preset(
        "PureJaxRL's MinAtar notebook: a flat 64-64 relu network, lr 5e-3",
        dict(steps=10_000_000, net="mlp"),
        dict(num_envs=64, minibatches=8, activation="relu", lr=5e-3),
    ),
    ("cartpole", "dqn"): Preset("the defaults: CleanRL's DQN, on ten envs, double"),
    ("acrobot", "dqn"): Preset("the defaults: CleanRL's DQN, on ten envs, double"),
    ("cartpole", "pqn"): Preset("the defaults: CleanRL's PQN, at twice its learning rate"),
    ("acrobot", "pqn"): Preset("the defaults: CleanRL's PQN, at twice its learning rate"),
    ("cartpole", "rppo"): Preset(f"{OURS}: four times PPO's learning rate", dict(), dict(lr=1e-3)),
    ("cartpole", "es"): Preset(f"the defaults: {OURS}"),
    ("acrobot", "es"): Preset(f"the defaults: {OURS}"),
    ("pendulum", "sac"): Preset(
        f"{OURS}: small networks and minibatches, a larger step size: a twentieth of the default's work",
        dict(steps=20_000),
        dict(hidden=(64, 64), batch_size=128, lr=1e-3),
    ),
    ("pendulum", "td3"): Preset(
        f"{OURS}: small networks and minibatches, a larger step size: a twentieth of the default's work",
        dict(steps=20_000),
        dict(hidden=(64, 64), batch_size=128, lr=1e-3),
    ),
}
