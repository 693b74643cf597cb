"""What a film shows is what evaluation saw."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from shoal.app import video
from shoal.app.assembly import MATMUL_PRECISION
from shoal.envs import cartpole
from shoal.population.lanes import stacked


def test_agents_act_in_the_precision_that_they_were_trained_in(tmp_path, monkeypatch):
    seen = set()

    def act(policy, carry, obs, mask, noise):
        seen.add(jax.config.jax_default_matmul_precision)
        return carry, jnp.argmax(obs @ policy, -1), {}

    monkeypatch.setattr(video, "STEPS", 5)
    env, agent = cartpole.make(), SimpleNamespace(carry=lambda: (), act=act)
    params = stacked(env.default_params(), 1)
    assert video.film(tmp_path / "film", agent, env, jnp.ones((1, 4, 2)), params, ["agent 0"]).exists()
    assert seen == {MATMUL_PRECISION}
