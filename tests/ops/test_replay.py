"""The ring and its n-step returns against a plain list of all steps ever taken; draws and their shares."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.ops import replay
from shoal.ops.replay import Index, Steps
from shoal.ops.shuffle import strata
from shoal.types import WHOLE, Batch

ENVS, GAMMA = 2, 0.5
KINDS = GOES_ON, TERMINATED, TRUNCATED = range(3)


def history(rng, steps, ends=0.3):
    """[steps, ENVS]: observations count the steps of all envs, so that each is known by its number."""
    kind = rng.choice(KINDS, (steps, ENVS), p=[1 - ends, ends / 2, ends / 2])
    number = np.arange(steps * ENVS, dtype=np.float32).reshape(steps, ENVS)
    return dict(
        obs=number,
        action=(number % 3).astype(np.int32),
        reward=rng.normal(size=(steps, ENVS)).astype(np.float32),
        terminated=kind == TERMINATED,
        truncated=kind == TRUNCATED,
        final_obs=number + 0.5,
        final_mask=np.stack([number % 2 == 0, number % 2 == 1], -1),
    )


def batch_of(columns):
    columns = jax.tree.map(jnp.asarray, columns)
    return Batch(**columns, mask=None, extras={}, carry=(), keys=None, key=None, progress=None)


@partial(jax.jit, static_argnums=1)
def put(ring, slots, written, columns):
    return replay.insert(ring, batch_of(columns), written)


def filled(past, slots, chunk):
    """The ring after all of the past, `chunk` steps at a time."""
    ring = replay.empty(slots, jnp.float32(0), jnp.int32(0), jnp.zeros(2, bool))
    ring = jax.tree.map(lambda x: jnp.broadcast_to(x, (ENVS, *x.shape)), ring)
    for start in range(0, len(past["reward"]), chunk):
        ring = put(ring, slots, jnp.int32(start), {k: x[start : start + chunk] for k, x in past.items()})
    return ring


@pytest.mark.parametrize(
    ("slots", "chunk", "chunks"), [(8, 3, 2), (8, 3, 7), (6, 2, 9), (5, 5, 3), (7, 1, 16)]
)
def test_the_ring_holds_the_last_steps_of_each_env_whatever_the_chunks(slots, chunk, chunks):
    past = history(np.random.default_rng(0), chunk * chunks)
    ring, steps = filled(past, slots, chunk), chunk * chunks
    for i in range(max(0, steps - slots), steps):
        for name in Steps._fields:
            np.testing.assert_array_equal(getattr(ring, name)[:, i % slots], past[name][i])
    assert np.all(np.asarray(ring.obs)[:, steps:] == 0)


def test_dtypes_are_kept_and_all_is_allowed_where_an_env_has_no_mask():
    image = jnp.zeros((3, 3, 1), jnp.uint8)
    obs, mask = {"image": image, "on": jnp.zeros((), bool)}, jnp.zeros(2, bool)
    ring = jax.tree.map(lambda x: x[None], replay.empty(4, obs, jnp.int32(0), mask))
    flag = jnp.zeros((1, 1), bool)
    seen = jax.tree.map(lambda x: jnp.ones((1, 1, *x.shape), x.dtype), obs)
    columns = dict(obs=seen, action=jnp.ones((1, 1), jnp.int32), reward=jnp.ones((1, 1)), final_obs=seen)
    batch = batch_of(columns | dict(terminated=flag, truncated=flag, final_mask=None))
    after = replay.insert(ring, batch, jnp.int32(6))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), ring
    )
    assert after.obs["image"].dtype == jnp.uint8
    assert after.final_mask[0].tolist() == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    unmasked = replay.empty(4, obs, jnp.int32(0))
    assert unmasked.final_mask is None
    assert replay.insert(jax.tree.map(lambda x: x[None], unmasked), batch, jnp.int32(6)).final_mask is None


# --- Returns ----------------------------------------------------------------------------------


def plain_return(past, env, i, steps):
    """As one would on paper: walk on from step i until the episode, the steps or the past end."""
    total, discount = 0.0, 1.0
    for j in range(i, min(i + steps, len(past["reward"]))):
        total += discount * past["reward"][j, env]
        discount *= GAMMA
        if past["terminated"][j, env]:
            return total, 0.0, j
        if past["truncated"][j, env]:
            break
    return total, discount, j


@partial(jax.jit, static_argnums=3)
def returns(ring, index, written, steps):
    return replay.n_step(ring, index, written, steps, GAMMA)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize(("slots", "written"), [(5, 3), (5, 5), (5, 6), (5, 14), (9, 10), (9, 31)])
def test_returns_equal_a_walk_through_the_past(slots, written, steps):
    """From every slot: never across the write head, through no end, bootstrapped through truncation only."""
    past = history(np.random.default_rng(slots + written), written)
    ring, held = filled(past, slots, 1), range(max(0, written - slots), written)
    index = Index(*np.array([(env, i % slots) for i in held for env in range(ENVS)], np.int32).T)
    got = returns(ring, index, jnp.int32(written), steps)
    want = [plain_return(past, env, i, steps) for i in held for env in range(ENVS)]
    np.testing.assert_allclose(got.reward, [total for total, _, _ in want], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.discount, [discount for _, discount, _ in want], rtol=1e-6)
    ends = [(j, env) for (_, _, j), env in zip(want, index.env)]
    np.testing.assert_array_equal(got.final_obs, [past["final_obs"][end] for end in ends])
    np.testing.assert_array_equal(got.final_mask, [past["final_mask"][end] for end in ends])


@pytest.mark.parametrize("kind", [TERMINATED, TRUNCATED])
@pytest.mark.parametrize("at", range(4))
def test_an_episode_may_end_at_every_place_of_the_steps(kind, at):
    """Reward 1 a step: 1 + 0.5 + … of the steps taken, and what follows counts only if cut short."""
    past = history(np.random.default_rng(0), 6, 0.0) | dict(reward=np.ones((6, ENVS), np.float32))
    past[{TERMINATED: "terminated", TRUNCATED: "truncated"}[kind]][at] = True
    got = returns(filled(past, 6, 6), Index(jnp.zeros(1, int), jnp.zeros(1, int)), jnp.int32(6), 3)
    taken = min(at + 1, 3)
    np.testing.assert_allclose(got.reward, [2 - 2.0 ** (1 - taken)])
    assert got.discount == (0 if kind == TERMINATED and at < 3 else 0.5**taken)
    assert got.final_obs == past["final_obs"][taken - 1, 0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 25))
def test_returns_equal_the_walk_for_any_past(seed, written):
    slots, rng = 7, np.random.default_rng(seed)
    past = history(rng, written, rng.uniform(0, 1))
    held = np.arange(max(0, written - slots), written)
    index = Index(jnp.zeros(slots, int), jnp.asarray(np.resize(held % slots, slots)))
    got = returns(filled(past, slots, 1), index, jnp.int32(written), 4)
    want = [plain_return(past, 0, i, 4)[:2] for i in np.resize(held, slots)]
    np.testing.assert_allclose(np.stack([got.reward, got.discount], 1), want, rtol=1e-5, atol=1e-5)


# --- Draws ------------------------------------------------------------------------------------


def drawn(envs, slots, minibatches, size, axis=WHOLE, key=0):
    return replay.sample_uniform(jax.random.key(key), envs, jnp.int32(slots), minibatches, size, axis)


@pytest.mark.parametrize(
    ("envs", "size", "groups"), [(1, 7, 1), (4, 6, 2), (6, 12, 6), (16, 24, 8), (10, 128, 2)]
)
def test_every_stratum_has_an_equal_share_of_every_minibatch(envs, size, groups):
    assert strata(envs, size) == groups
    index = drawn(envs, 11, 3, size)
    assert index.env.shape == index.slot.shape == (3, size)
    assert np.all((np.asarray(index.slot) >= 0) & (np.asarray(index.slot) < 11))
    for minibatch in np.asarray(index.env) // (envs // groups):
        np.testing.assert_array_equal(np.bincount(minibatch, minlength=groups), size // groups)


def test_steps_are_drawn_uniformly():
    """Chi-squared over 4 envs × 5 slots, 20,000 draws: 99.9 % of keys stay below 43.8 at 19 degrees."""
    index = drawn(4, 5, 50, 400)
    seen = np.bincount(np.ravel(index.env) * 5 + np.ravel(index.slot), minlength=20)
    assert np.sum((seen - 1000) ** 2 / 1000) < 43.8


def test_shares_of_the_data_axis_draw_the_same_rows():
    rows = lambda index, first: {*zip((np.ravel(index.env) + first).tolist(), np.ravel(index.slot).tolist())}
    whole = drawn(8, 100, 1, 16)
    for size in (2, 4, 8):
        shares = [drawn(8, 100, 1, 16, WHOLE._replace(index=i, size=size)) for i in range(size)]
        assert all(share.env.shape == (1, 16 // size) for share in shares)
        assert set.union(*(rows(share, 8 // size * i) for i, share in enumerate(shares))) == rows(whole, 0)


def test_another_key_draws_other_rows():
    assert not np.array_equal(drawn(1, 1000, 1, 64).slot, drawn(1, 1000, 1, 64, key=1).slot)


# --- Sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("envs", "steps", "buffer", "message", "hint"),
    [
        (3, 1, 100, "buffer_size = 100 is not divisible by num_envs = 3", "--dqn.buffer_size 102"),
        (4, 30, 100, "120 steps of an update do not fit", "--dqn.buffer_size 120"),
        (1, 1, 0, "buffer_size 0 must be from 1", ""),
        (1, 1, 2**31, "buffer_size 2147483648 must be from 1", ""),
    ],
)
def test_a_buffer_that_does_not_fit_names_one_that_does(envs, steps, buffer, message, hint):
    with pytest.raises(ShoalError, match=message) as error:
        replay.check_replay("dqn", envs, steps, buffer, 32)
    assert hint in (error.value.hint or "")
