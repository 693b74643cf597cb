"""Stable-Baselines3's PPO as a contestant: one agent, envs stepped one after another; plain Python."""

from collections.abc import Callable

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

PACKAGES = ("stable-baselines3", "torch", "gymnasium", "numpy")
NOTE = "one agent at a time; its clipped value loss takes the clipped error alone, not the worse of two"


def start(task: dict[str, int]) -> tuple[Callable[[int], int], Callable[[], list[float]], dict]:
    envs, steps = task["envs"], task["steps"]
    model = make(task)
    model.learn(envs * steps)

    def stretch(updates: int) -> int:
        before = model.num_timesteps
        model.learn(updates * envs * steps, reset_num_timesteps=False)
        return model.num_timesteps - before

    def learn() -> list[float]:
        returns = Returns(after=(task["updates"] - -(-task["updates"] // 20)) * envs * steps)
        make(task).learn(task["updates"] * envs * steps, callback=returns)
        return [sum(returns.seen) / len(returns.seen) if returns.seen else float("nan")]

    return stretch, learn, dict(compile_s=0.0, note=NOTE)


def make(task: dict[str, int]) -> PPO:
    return PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", task["envs"], seed=task["first"]),
        learning_rate=lambda remaining: 2.5e-4 * remaining,
        n_steps=task["steps"],
        batch_size=task["envs"] * task["steps"] // task["minibatches"],
        n_epochs=4,
        clip_range_vf=0.2,
        ent_coef=0.01,
        vf_coef=0.25,  # its value loss has no factor of a half
        policy_kwargs=dict(net_arch=dict(pi=[64, 64], vf=[64, 64])),
        seed=task["first"],
        device="cpu",
    )


class Returns(BaseCallback):
    """Returns of the episodes that end after so many env steps."""

    def __init__(self, after: int):
        super().__init__()
        self.after = after
        self.seen: list[float] = []

    def _on_step(self) -> bool:
        if self.num_timesteps > self.after:
            self.seen += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True
