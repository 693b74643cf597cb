"""The rollout against the obvious loop: one env, one step at a time, the same keys."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes
from shoal.rollout import device
from shoal.rollout.device import Actors, collect, evaluate, rollout_keys, start
from shoal.rollout.streams import EVALUATE, RESET, bulk, per_env, stream
from shoal.types import Agent

T, B, LIMIT = 40, 5, 6
ENV = probes.walk(LIMIT)
PARAMS = ENV.default_params()


class Carry(NamedTuple):
    steps: jax.Array


def act(policy, carry, obs, mask, noise):
    """Picks an allowed action by its noise, or by the policy's taste where greedy, and counts its steps."""
    scores = policy + (0.0 if noise is None else noise) + 0.0 * obs[:, :1]
    action = jnp.argmax(jnp.where(mask, scores, -jnp.inf), -1).astype(jnp.int32)
    return Carry(carry.steps + 1), action, {"steps": carry.steps, "score": jnp.max(scores, -1)}


AGENT = Agent(
    init=None,
    policy=None,
    carry=lambda: Carry(jnp.int32(0)),
    noise=lambda key, steps: jax.random.normal(key, (steps, 3)),
    act=act,
    prepare=None,
    grad=None,
    apply=None,
)
TASTE = jnp.asarray([0.3, 0.2, 0.1])


class Row(NamedTuple):
    obs: np.ndarray
    mask: np.ndarray
    action: int
    reward: float
    terminated: bool
    truncated: bool
    final_obs: np.ndarray
    final_mask: np.ndarray
    steps: int  # the carry before acting


reset, step, mask_of = jax.jit(ENV.reset), jax.jit(ENV.step), jax.jit(ENV.action_mask)
act_once = jax.jit(act)


def slow_rollout(key, number, steps):
    """One env from its reset: rows and (return, length) of the episodes that ended."""
    noise_key, step_key, reset_key = jax.random.split(key, 3)
    noise, step_keys, reset_keys = (
        AGENT.noise(noise_key, steps),
        bulk(step_key, steps),
        bulk(reset_key, steps),
    )
    state, obs = reset(per_env(stream(0, 0, RESET), jnp.asarray([number]))[0], PARAMS)
    rows, episodes, total, length = [], [], 0.0, 0
    for t in range(steps):
        mask = mask_of(state, PARAMS)
        carry = Carry(jnp.asarray([length], jnp.int32))
        _, action, _ = act_once(TASTE, carry, obs[None], mask[None], noise[t][None])
        after = step(step_keys[t], state, action[0], PARAMS)
        total, length = total + float(after.reward), length + 1
        terminated = bool(after.terminated)
        truncated = (bool(after.truncated) or length == LIMIT) and not terminated
        final = after.obs, mask_of(after.state, PARAMS)
        row = obs, mask, int(action[0]), float(after.reward), terminated, truncated, *final, length - 1
        rows.append(Row(*row))
        state, obs = after.state, after.obs
        if terminated or truncated:
            episodes.append((total, length))
            state, obs = reset(reset_keys[t], PARAMS)
            total, length = 0.0, 0
    return rows, episodes, obs, total, length


def first_keys(envs, update=0, agent=0, seed=0):
    return rollout_keys(jnp.uint32(seed), jnp.int32(agent), jnp.int32(update), jnp.arange(envs))


@partial(jax.jit, static_argnums=1)
def fast(keys, steps, actors=None):
    if actors is None:
        actors = start(AGENT, ENV, PARAMS, stream(0, 0, RESET), jnp.arange(len(keys)))
    return collect(AGENT, ENV, TASTE, actors, PARAMS, keys, steps)


@pytest.fixture(scope="module")
def slow():
    return [slow_rollout(key, b, T) for b, key in enumerate(first_keys(B))]


@pytest.fixture(scope="module")
def rolled():
    return fast(first_keys(B), T)


def test_a_rollout_equals_the_slow_loop(slow, rolled):
    _, columns, _ = rolled
    for b, (rows, *_) in enumerate(slow):
        for name in Row._fields[:-1]:
            want = np.stack([np.asarray(getattr(row, name)) for row in rows])
            np.testing.assert_allclose(columns[name][:, b], want, rtol=1e-6, err_msg=name)


def test_the_comparison_saw_every_kind_of_end(slow):
    rows = [row for rows, *_ in slow for row in rows]
    assert any(row.terminated for row in rows)
    assert any(row.truncated and row.steps + 1 < LIMIT for row in rows)  # cut by the env
    assert any(row.truncated and row.steps + 1 == LIMIT for row in rows)  # cut by the limit
    assert any(row.terminated and row.steps + 1 == LIMIT for row in rows)


def test_episodes_count_their_last_step(slow, rolled):
    _, _, episodes = rolled
    ended = [episode for _, episodes, *_ in slow for episode in episodes]
    assert episodes.count == len(ended)
    np.testing.assert_allclose(episodes.return_sum, sum(total for total, _ in ended), rtol=1e-5)
    assert episodes.length_sum == sum(length for _, length in ended)


def test_what_is_left_over_goes_on_in_the_next_rollout(slow, rolled):
    actors, _, _ = rolled
    for b, (_, _, obs, total, length) in enumerate(slow):
        np.testing.assert_allclose(actors.obs[b], obs, rtol=1e-6)
        np.testing.assert_allclose(actors.episode_return[b], total, rtol=1e-5, atol=1e-6)
        assert actors.episode_length[b] == length
        assert actors.carry.steps[b] == length


def test_the_final_observation_is_the_true_one_and_the_next_row_a_fresh_reset(rolled):
    _, columns, _ = rolled
    ended = np.asarray(columns["terminated"] | columns["truncated"])[:-1]
    final, following = np.asarray(columns["final_obs"])[:-1], np.asarray(columns["obs"])[1:]
    np.testing.assert_array_equal(final[~ended], following[~ended])
    assert np.all(final[ended][:, 1] > 0)  # time since the reset
    assert np.all(following[ended][:, 1] == 0)


def test_every_reset_is_a_new_one(rolled):
    _, columns, _ = rolled
    obs = np.asarray(columns["obs"])
    starts = obs[obs[..., 1] == 0][:, 0]
    assert len(starts) > 30
    assert len(np.unique(starts)) == len(starts)


def test_truncated_is_never_set_beside_terminated(rolled):
    _, columns, _ = rolled
    assert not np.any(columns["terminated"] & columns["truncated"])


def test_masks_are_honoured_and_recorded(rolled):
    _, columns, _ = rolled
    picked = np.take_along_axis(np.asarray(columns["mask"]), np.asarray(columns["action"])[..., None], -1)
    assert picked.all()
    assert not np.asarray(columns["mask"]).all()


def test_a_recurrent_carry_restarts_with_each_episode(slow, rolled):
    _, columns, _ = rolled
    for b, (rows, *_) in enumerate(slow):
        assert columns["extras"]["steps"][:, b].tolist() == [row.steps for row in rows]
    np.testing.assert_array_equal(columns["extras"]["steps"], columns["obs"][..., 1])


def test_two_rollouts_continue_each_other(rolled):
    actors, columns, _ = rolled
    _, following, _ = fast(first_keys(B, update=1), T, actors)
    last, first = np.asarray(columns["final_obs"])[-1], np.asarray(following["obs"])[0]
    ended = np.asarray(columns["terminated"] | columns["truncated"])[-1]
    np.testing.assert_array_equal(first[~ended], last[~ended])
    np.testing.assert_array_equal(first, actors.obs)


def test_the_draws_of_one_env_do_not_depend_on_how_many_there_are(rolled):
    _, columns, _ = rolled
    _, fewer, _ = fast(first_keys(2), T)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:, :2], b, rtol=1e-6), columns, fewer)


def test_an_agent_draws_the_same_alone_or_among_sixteen():
    one = jax.jit(lambda agent: collect_for(agent))(jnp.int32(7))
    many = jax.jit(jax.vmap(collect_for))(jnp.arange(16, dtype=jnp.int32))
    np.testing.assert_array_equal(many["action"][7], one["action"])
    np.testing.assert_array_equal(many["terminated"][7], one["terminated"])
    np.testing.assert_allclose(many["obs"][7], one["obs"], rtol=1e-6)
    flat = np.asarray(many["obs"])[:, 0, :, 0].ravel()  # all start states of all agents
    assert len(np.unique(flat)) == len(flat)


def collect_for(agent):
    keys = rollout_keys(jnp.uint32(3), agent, jnp.int32(0), jnp.arange(4))
    actors = start(AGENT, ENV, PARAMS, device.reset_key(jnp.uint32(3), agent), jnp.arange(4))
    return collect(AGENT, ENV, TASTE, actors, PARAMS, keys, 8)[1]


def test_updates_seeds_and_agents_draw_different_numbers(rolled):
    _, columns, _ = rolled
    for other in (first_keys(B, update=1), first_keys(B, agent=1), first_keys(B, seed=1)):
        _, changed, _ = fast(other, T)
        same = np.asarray(changed["extras"]["score"]) == np.asarray(columns["extras"]["score"])
        assert same.mean() < 0.05


def test_an_env_without_limit_or_mask_runs_on():
    endless = ENV._replace(time_limit=0, action_mask=None)
    params = probes.Walk(np.float32(0), np.float32(0))
    free = AGENT._replace(act=lambda policy, carry, obs, mask, noise: act(policy, carry, obs, True, noise))

    def run(keys):
        actors = start(free, endless, params, stream(0, 0, RESET), jnp.arange(2))
        return collect(free, endless, TASTE, actors, params, keys, 30)

    actors, columns, episodes = jax.jit(run)(first_keys(2))
    assert columns["mask"] is None
    assert episodes.count == 0
    assert actors.episode_length.tolist() == [30, 30]


def test_an_episode_that_diverges_does_not_spoil_the_sums_of_those_that_end():
    actors = jax.jit(lambda: start(AGENT, ENV, PARAMS, stream(0, 0, RESET), jnp.arange(B)))()
    spoilt = actors._replace(episode_return=actors.episode_return.at[0].set(jnp.inf))
    _, _, episodes = fast(first_keys(B), 1, spoilt)
    assert not np.isnan(episodes.count)
    assert not np.isnan(episodes.return_sum)


# --- Evaluation -------------------------------------------------------------------------------


def slow_evaluation(number, max_steps, greedy):
    key = per_env(stream(0, 0, EVALUATE), jnp.asarray([number]))[0]
    start_key, act_key, world_key = jax.random.split(key, 3)
    state, obs = reset(start_key, PARAMS)
    total = 0.0
    for t in range(max_steps):
        noise = None if greedy else AGENT.noise(jax.random.fold_in(act_key, t), 1)
        carry, mask = Carry(jnp.asarray([t], jnp.int32)), mask_of(state, PARAMS)
        _, action, _ = act_once(TASTE, carry, obs[None], mask[None], noise)
        after = step(jax.random.fold_in(world_key, t), state, action[0], PARAMS)
        total += float(after.reward)
        state, obs = after.state, after.obs
        if after.terminated or after.truncated or t + 1 == LIMIT:
            return total, t + 1, True
    return total, max_steps, False


@pytest.mark.parametrize("greedy", [False, True])
def test_evaluation_equals_the_slow_loop(greedy):
    scores = jax.jit(lambda: evaluate(AGENT, ENV, TASTE, PARAMS, jnp.arange(7), 4, greedy))()
    for i in range(7):
        total, length, finished = slow_evaluation(i, 4, greedy)
        np.testing.assert_allclose(scores.returns[i], total, rtol=1e-5)
        assert scores.lengths[i] == length
        assert scores.finished[i] == finished


def test_an_episode_beyond_the_step_cap_is_reported_as_unfinished():
    run = jax.jit(lambda cap: evaluate(AGENT, ENV, TASTE, PARAMS, jnp.arange(20), cap, True))
    short, long = run(2), run(50)
    assert 0 < np.sum(~np.asarray(short.finished)) < 20
    assert np.all(np.asarray(short.lengths)[~np.asarray(short.finished)] == 2)
    assert np.all(long.finished)
    assert np.all(long.lengths <= LIMIT)


def test_all_agents_face_the_same_episodes():
    """Two policies that act alike score alike; start states follow from the episode's number alone."""
    run = lambda policy: evaluate(AGENT, ENV, policy, PARAMS, jnp.arange(6), 9, True)
    both = jax.jit(jax.vmap(run))(jnp.stack([TASTE, 2 * TASTE]))
    np.testing.assert_array_equal(both.returns[0], both.returns[1])
    later = jax.jit(lambda: evaluate(AGENT, ENV, TASTE, PARAMS, jnp.arange(3, 6), 9, True))()
    np.testing.assert_allclose(later.returns, both.returns[0, 3:], rtol=1e-6)
    assert len(np.unique(both.returns[0])) == 6


def test_actors_are_led_by_envs():
    actors = jax.eval_shape(lambda: start(AGENT, ENV, PARAMS, stream(0, 0, RESET), jnp.arange(B)))
    assert isinstance(actors, Actors)
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(actors))
