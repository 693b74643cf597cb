"""Advantages and returns against the obvious loops, and against what can be worked out on paper."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.ops import advantages

gae, discounted_sums = jax.jit(advantages.gae), jax.jit(advantages.discounted_sums)
lambda_returns = jax.jit(advantages.lambda_returns)
GAMMA, LAMBDA = np.float32(0.9), np.float32(0.8)


def slow_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """By the definition: the sum of (gamma lambda)^k delta_{t+k} up to the episode's or the chunk's end."""
    advantage = np.zeros(len(reward))
    for start in range(len(reward)):
        weight = 1.0
        for t in range(start, len(reward)):
            future = 0.0 if terminated[t] else gamma * next_value[t]
            advantage[start] += weight * (reward[t] + future - value[t])
            if terminated[t] or truncated[t]:
                break
            weight *= gamma * gae_lambda
    return advantage


def columns(steps, streams, seed=0):
    return np.random.default_rng(seed).normal(size=(3, steps, streams)).astype(np.float32)


def test_gae_equals_the_slow_sum_for_every_pattern_of_ends_in_four_steps():
    patterns = np.array(list(itertools.product(range(4), repeat=4))).T  # [T, 256]; bit 0 and bit 1
    terminated, truncated = patterns % 2 == 1, patterns >= 2
    reward, value, next_value = columns(*patterns.shape)
    fast = np.asarray(gae(reward, value, next_value, terminated, truncated, GAMMA, LAMBDA))
    for i in range(patterns.shape[1]):
        rows = (x[:, i] for x in (reward, value, next_value, terminated, truncated))
        np.testing.assert_allclose(fast[:, i], slow_gae(*rows, GAMMA, LAMBDA), atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=17, max_size=17), st.integers(0, 1000))
def test_gae_equals_the_slow_sum_for_long_rollouts(ends, seed):
    terminated, truncated = np.array(ends) % 2 == 1, np.array(ends) >= 2
    reward, value, next_value = columns(17, 1, seed)[..., 0]
    rows = reward, value, next_value, terminated, truncated, GAMMA, LAMBDA
    np.testing.assert_allclose(gae(*rows), slow_gae(*rows), atol=1e-5)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("end", [0, 2, 5])
def test_constant_reward_is_worth_the_whole_future_through_truncation_only(gae_lambda, end):
    """Reward 1 for ever is worth 1 / (1 - gamma); a time limit must not change that, a true end must."""
    steps, value = 6, np.full(6, 10.0, np.float32)  # 1 / (1 - 0.9)
    reward, never = np.ones(steps, np.float32), np.zeros(steps, bool)
    at = np.arange(steps) == end
    limited = gae(reward, value, value, never, at, GAMMA, np.float32(gae_lambda))
    np.testing.assert_allclose(limited, 0, atol=1e-5)  # a true value leaves no advantage
    ended = gae(reward, value, value, at, never, GAMMA, np.float32(1.0)) + value
    left = end - np.arange(steps) + 1  # steps until the end, where it is still ahead
    want = np.where(left > 0, (1 - 0.9 ** np.maximum(left, 0)) / 0.1, 10.0)
    np.testing.assert_allclose(ended, want, rtol=1e-5)


def test_an_end_hides_everything_behind_it():
    reward, value, next_value = columns(6, 1)[..., 0]
    at, never = np.arange(6) == 2, np.zeros(6, bool)
    for ends in ((at, never), (never, at)):
        one = gae(reward, value, next_value, *ends, GAMMA, LAMBDA)
        other = gae(reward + 100 * (np.arange(6) > 2), value, next_value, *ends, GAMMA, LAMBDA)
        np.testing.assert_array_equal(one[:3], other[:3])
        assert not np.allclose(one[3:], other[3:])


def test_a_chunk_end_bootstraps_like_a_truncation():
    reward, value, next_value = columns(5, 1)[..., 0]
    never, last = np.zeros(5, bool), np.arange(5) == 4
    free = gae(reward, value, next_value, never, never, GAMMA, LAMBDA)
    np.testing.assert_array_equal(free, gae(reward, value, next_value, never, last, GAMMA, LAMBDA))


def test_a_meaningless_value_after_a_termination_is_never_read():
    at, never = np.arange(4) == 1, np.zeros(4, bool)
    next_value = np.where(at, np.nan, 1.0).astype(np.float32)
    ones = np.ones(4, np.float32)
    assert np.isfinite(gae(ones, ones, next_value, at, never, GAMMA, LAMBDA)).all()


def slow_lambda_return(t, reward, next_value, terminated, truncated):
    """The recursion as the papers write it."""
    if terminated[t]:
        return reward[t]
    if truncated[t] or t == len(reward) - 1:
        return reward[t] + GAMMA * next_value[t]
    later = slow_lambda_return(t + 1, reward, next_value, terminated, truncated)
    return reward[t] + GAMMA * (LAMBDA * later + (1 - LAMBDA) * next_value[t])


def test_lambda_returns_equal_the_papers_recursion_for_every_pattern_of_ends_in_four_steps():
    patterns = np.array(list(itertools.product(range(3), repeat=4))).T
    ends = patterns == 1, patterns == 2
    reward, _, next_value = columns(*patterns.shape)
    fast = np.asarray(lambda_returns(reward, next_value, *ends, GAMMA, LAMBDA))
    for i in range(patterns.shape[1]):
        rows = [x[:, i] for x in (reward, next_value, *ends)]
        want = [slow_lambda_return(t, *rows) for t in range(4)]
        np.testing.assert_allclose(fast[:, i], want, atol=1e-5)


def test_lambda_returns_are_advantages_plus_values():
    """Where the next value is the next row's, as it is inside an episode; and cut by both kinds of end."""
    rng = np.random.default_rng(0)
    terminated, truncated = rng.random((30, 4)) < 0.1, rng.random((30, 4)) < 0.1
    reward, value, final = columns(30, 4)
    following = np.concatenate([value[1:], final[-1:]])
    next_value = np.where(terminated | truncated, final, following)
    advantage = gae(reward, value, next_value, terminated, truncated, GAMMA, LAMBDA)
    returns = lambda_returns(reward, next_value, terminated, truncated, GAMMA, LAMBDA)
    np.testing.assert_allclose(returns, advantage + value, atol=1e-5)


@pytest.mark.parametrize("trace", [0.0, 1.0])
def test_lambda_0_is_one_step_and_lambda_1_the_whole_return(trace):
    reward, _, next_value = columns(5, 1)[..., 0]
    never = np.zeros(5, bool)
    got = lambda_returns(reward, next_value, never, never, GAMMA, np.float32(trace))
    whole = [(GAMMA ** np.arange(5 - t) * reward[t:]).sum() for t in range(5)]
    whole += GAMMA ** (5 - np.arange(5)) * next_value[-1]
    np.testing.assert_allclose(got, whole if trace else reward + GAMMA * next_value, atol=1e-5)


def test_discounted_sums_carry_over_chunks_and_restart_after_an_end():
    rng = np.random.default_rng(0)
    reward, ended = rng.normal(size=(12, 3)).astype(np.float32), rng.random((12, 3)) < 0.3
    total, want = np.zeros(3), []
    for r, e in zip(reward, ended):
        total = r + 0.9 * total
        want.append(total)
        total = np.where(e, 0.0, total)
    first, one = discounted_sums(reward[:5], ended[:5], jnp.zeros(3), GAMMA)
    last, two = discounted_sums(reward[5:], ended[5:], first, GAMMA)
    np.testing.assert_allclose(np.concatenate([one, two]), want, atol=1e-5)
    np.testing.assert_allclose(last, total, atol=1e-5)
