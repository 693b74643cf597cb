"""The rungs of the probe ladder as tests: what fails here says where to look.

An algorithm's test file inherits the classes that fit it and names its `climber`. One population climbs all
rungs in one program, three seeds a rung, and every seed must pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from probes import ACTING, BOTH, CONSTANT, DELAYED, FORBIDDEN, LIMITED, RUNGS, SEEING, Rung

SEEDS, GAMMA = 3, 0.9


class Climber(NamedTuple):
    algo: Any  # the module
    sizes: Any
    knobs: Any  # with gamma = GAMMA where there is one
    updates: int
    # (learner, obs [n, 2], obs_space, action_space) -> the value that the agent sees in each [n]
    value: Callable[..., Any] | None = None
    continuous: bool = False
    score: float = 0.95  # of the training policy, which may explore, over the last tenth of the updates


class Climbed(NamedTuple):
    value: Callable[[int, Any], np.ndarray]  # (rung, obs [n, 2]) -> [seeds, n]
    action: Callable[[int, Any], np.ndarray]  # (rung, obs [n, 2]) -> the greedy policy's, 0 … 2, [seeds, n]
    score: Callable[[int], np.ndarray]  # rung -> mean return of the last updates [seeds]


def climb(climber: Climber) -> Climbed:
    env, rungs = probes.ladder(climber.continuous), np.repeat(np.asarray(RUNGS, np.int32), SEEDS)
    state, metrics = probes.train(
        env,
        climber.algo,
        climber.sizes,
        climber.knobs,
        climber.updates,
        len(rungs),
        Rung(jnp.asarray(rungs)),
    )
    assert all(np.isfinite(column).all() for column in metrics.values())
    agent = probes.agent_for(env, climber.algo, climber.sizes)
    spaces = env.obs_space(Rung()), env.action_space(Rung())
    of = lambda rung: jax.tree.map(lambda x: x[rungs == rung], state.learner)

    def value(rung, obs):
        assert climber.value is not None
        read = partial(climber.value, obs_space=spaces[0], action_space=spaces[1])
        return np.asarray(jax.vmap(read, (0, None))(of(rung), jnp.asarray(obs)))

    def action(rung, obs):
        obs = jnp.asarray(obs)
        carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(obs), *x.shape)), agent.carry())
        mask = jnp.ones((len(obs), 3), bool).at[:, 0].set(rung != FORBIDDEN)
        mask = None if climber.continuous else mask
        greedy = lambda learner: agent.act(agent.policy(learner), carry, obs, mask, None)[1]
        chosen = np.asarray(jax.jit(jax.vmap(greedy))(of(rung)))
        return np.clip(np.floor(1.5 * (chosen[..., 0] + 1)), 0, 2) if climber.continuous else chosen

    def score(rung):
        last = max(5, climber.updates // 10)
        ended, total = (
            np.asarray(metrics[name])[-last:, rungs == rung].sum(0) for name in ("episodes", "return_sum")
        )
        return total / ended

    return Climbed(value, action, score)


class _Climbing:
    climber: Climber

    @pytest.fixture(scope="class")
    @classmethod
    def climbed(cls):
        return climb(cls.climber)


class Acting(_Climbing):
    """For every algorithm."""

    def test_the_actor_learns_which_action_pays(self, climbed):
        assert np.all(climbed.action(ACTING, [[0.0, 0.0]]) == 1)
        assert np.all(climbed.score(ACTING) > self.climber.score)

    def test_the_actor_sees_the_observation(self, climbed):
        seen = climbed.action(BOTH, [[1.0, 0.0], [-1.0, 0.0]])
        assert np.all(seen == [1, 2])
        assert np.all(climbed.score(BOTH) > self.climber.score)


class Masked(_Climbing):
    """For algorithms that obey action masks."""

    def test_the_best_allowed_action_is_learned_beside_a_better_forbidden_one(self, climbed):
        assert np.all(climbed.action(FORBIDDEN, [[0.0, 0.0]]) == 1)
        assert np.all(climbed.score(FORBIDDEN) > self.climber.score - 0.05)
        assert np.all(climbed.score(FORBIDDEN) <= 1.0)  # the forbidden one pays 5


class Valuing(_Climbing):
    """For algorithms that learn values."""

    def test_a_constant_is_learned_as_a_value(self, climbed):
        np.testing.assert_allclose(climbed.value(CONSTANT, [[0.0, 0.0]]), 1.0, atol=0.05)

    def test_the_critic_sees_the_observation(self, climbed):
        seen = climbed.value(SEEING, [[-1.0, 0.0], [1.0, 0.0]])
        np.testing.assert_allclose(seen, [[-1.0, 1.0]] * SEEDS, atol=0.1)

    def test_a_delayed_reward_is_discounted_back(self, climbed):
        seen = climbed.value(DELAYED, [[0.0, -1.0], [0.0, 0.0], [0.0, 1.0]])
        np.testing.assert_allclose(seen, [[GAMMA**2, GAMMA, 1.0]] * SEEDS, atol=0.05)

    def test_a_time_limit_does_not_shorten_what_a_value_sees(self, climbed):
        """1 for ever is worth 1 / (1 - 0.9) = 10; cut off after five steps unbootstrapped, at most 4.1."""
        np.testing.assert_allclose(climbed.value(LIMITED, [[0.0, 0.0]]), 10.0, atol=0.5)
