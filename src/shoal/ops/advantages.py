"""Returns and advantages over a rollout; time leads, any axes may follow."""

import jax
import jax.numpy as jnp

from shoal.types import Array


def gae(
    reward: Array,  # [T, …]
    value: Array,  # [T, …] V(obs_t)
    next_value: Array,  # [T, …] V of the true observation after step t, not of a reset one
    terminated: Array,  # [T, …] bool
    truncated: Array,  # [T, …] bool
    gamma: Array | float,
    gae_lambda: Array | float,
) -> Array:
    """Generalised advantage estimates [T, …] (Schulman et al. 2016, eq. 16).

    Two masks: the value bootstraps through truncation but not through termination, and the
    recursion is cut by either, since the next row belongs to another episode.
    """
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = jnp.where(terminated | truncated, 0.0, gamma * gae_lambda)

    def backwards(advantage, row):
        delta_t, decay_t = row
        advantage = delta_t + decay_t * advantage
        return advantage, advantage

    _, advantage = jax.lax.scan(backwards, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)
    return advantage


def lambda_returns(
    reward: Array,  # [T, …]
    next_value: Array,  # [T, …] of the true observation after step t, as for gae
    terminated: Array,  # [T, …] bool
    truncated: Array,  # [T, …] bool
    gamma: Array | float,
    trace: Array | float,  # lambda
) -> Array:
    """Mixtures of all n-step returns [T, …] (Sutton & Barto 2018, eq. 12.3), cut as in `gae`.

    With the largest action value as the value they are the Q(lambda) returns of Peng & Williams (1994). They
    equal gae's advantages plus values, without the values of the rows themselves.
    """
    carry_on = jnp.where(terminated | truncated, 0.0, trace)
    worth = jnp.where(terminated, 0.0, next_value)

    def backwards(after, row):
        reward_t, worth_t, carry_on_t = row
        after = reward_t + gamma * (worth_t + carry_on_t * (after - worth_t))
        return after, after

    _, returns = jax.lax.scan(backwards, worth[-1], (reward, worth, carry_on), reverse=True)
    return returns


def discounted_sums(reward: Array, ended: Array, start: Array, gamma: Array | float) -> tuple[Array, Array]:
    """Running discounted return R_t = r_t + gamma R_{t-1}, restarted after an episode's end.

    reward, ended: [T, …]; start: […] the sum carried in. Returns the sum carried out and all of [T, …].
    """

    def forwards(total, row):
        reward_t, ended_t = row
        total = reward_t + gamma * total
        return jnp.where(ended_t, 0.0, total), total

    return jax.lax.scan(forwards, start, (reward, ended))
