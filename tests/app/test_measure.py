"""What is measured is what users run."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from shoal.app import measure, policies
from shoal.envs.spaces import to_json
from shoal.mesh.devices import MATMUL_PRECISION
from shoal.types import Box, Discrete


def test_agents_serve_in_the_precision_that_they_were_trained_in(monkeypatch):
    seen = []

    def act(policy, carry, obs, mask, noise):
        seen.append(jax.config.jax_default_matmul_precision)
        return carry, jnp.argmax(obs @ policy, -1), {}

    spaces = dict(obs_space=to_json(Box(-1.0, 1.0, (4,))), action_space=to_json(Discrete(2)))
    contract = dict(algo="ppo", agents=[0], returns=[1.0]) | spaces
    agent = SimpleNamespace(carry=lambda: (), act=act)
    trained = policies.Policy(agent, jnp.ones((1, 4, 2)), contract, single=False)
    monkeypatch.setattr(policies, "load", lambda path, agents: trained)
    monkeypatch.setattr(policies.Policy, "remembers", False)  # asked by tracing, which computes nothing
    monkeypatch.setattr(measure, "SIZES", (1, 3))
    assert [row["agents"] for row in measure.act("a run")] == [1, 3]
    assert len(seen) >= 4  # each size, as one program and in a loop
    assert set(seen) == {MATMUL_PRECISION}
