"""The evolution strategy: perturbations, whose return is whose, ranks, slope, and the probe ladder."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import rankdata

import ladder
import probes
from ladder import Climber
from probes import lane
from shoal.algos import es
from shoal.algos.es import Carry, Knobs, Policy, Sizes
from shoal.errors import ShoalError
from shoal.nets import house_net
from shoal.nets.mlp import forward, linear
from shoal.rollout import device
from shoal.types import WHOLE, Batch, Box, Discrete, Outputs

ENV = probes.walk()
SIZES = Sizes(num_envs=6, num_steps=4, hidden=(5,))
AGENT = probes.agent_for(ENV, es, SIZES)
LAYERS = tuple(
    linear(jax.random.normal(jax.random.key(i), shape)) for i, shape in enumerate([(5, 2), (3, 5)])
)
SEEDS = jax.random.bits(jax.random.key(0), (4000, 2), jnp.uint32)


# --- Perturbations ----------------------------------------------------------------------------


def test_a_perturbation_is_made_of_independent_signs():
    """Each sum of 4,000 has a deviation of 1/63; none of 900 lies beyond five of them."""
    parts = jax.jit(jax.vmap(partial(es._signs, LAYERS)))(SEEDS)
    assert [tuple(x.shape[1] for x in part) for part in parts] == [(5, 2, 5), (3, 5, 3)]
    signs = np.concatenate([x for part in parts for x in part], 1)
    assert set(np.unique(signs)) == {-1, 1}
    correlation = signs.T @ signs / len(SEEDS)
    assert np.abs(np.append(signs.mean(0), correlation - np.eye(len(correlation)))).max() < 5 / 63


def dense(policy, seed):
    """The weights and biases of one env's network, written out."""
    signs, sigma = es._signs(policy.params, seed), policy.sigma
    return [
        (layer.weight + sigma * np.outer(u, v), layer.bias + sigma * w)
        for layer, (u, v, w) in zip(policy.params, signs)
    ]


def test_envs_act_through_networks_of_their_own():
    policy = Policy(LAYERS, jnp.float32(0.3))
    obs = jax.random.normal(jax.random.key(9), (7, 2))
    got = jax.jit(lambda seed: es._perturbed(policy, seed, obs, "tanh"))(SEEDS[:7])
    for x, seed, row in zip(np.asarray(obs), SEEDS, got):
        (w1, b1), (w2, b2) = dense(policy, seed)
        np.testing.assert_allclose(row, w2 @ np.tanh(w1 @ x + b1) + b2, rtol=1e-4, atol=1e-5)
    assert not np.allclose(got, forward(LAYERS, obs, "tanh"), atol=0.1)


def test_without_noise_the_mean_acts_and_the_carry_stays():
    learner = AGENT.init(jax.random.key(0), Knobs())._replace(params=LAYERS)
    obs, carry = jax.random.normal(jax.random.key(9), (7, 2)), device.spread(AGENT.carry(), 7)
    after, action, _ = AGENT.act(AGENT.policy(learner), carry, obs, None, None)
    assert action.tolist() == forward(LAYERS, obs, "tanh").argmax(-1).tolist()
    assert not after.begun.any()


def test_noise_is_one_seed_for_all_steps_of_a_rollout():
    noise = AGENT.noise(jax.random.key(0), 5)
    assert noise.shape == (5, 2)
    assert len(np.unique(noise, axis=0)) == 1


# --- Whose return is whose --------------------------------------------------------------------


@pytest.fixture(scope="module")
def generations():
    """Twelve rollouts shorter than episodes may be, and what prepare makes of each; nothing is learned."""

    def run(key):
        learner = AGENT.init(key, Knobs(sigma=0.5))
        learner = learner._replace(local=device.spread(learner.local, SIZES.num_envs))
        params, number = ENV.default_params(), jnp.arange(SIZES.num_envs)
        actors = device.start(AGENT, ENV, params, device.reset_key(0, 0), number)

        def generation(scanned, update):
            learner, actors = scanned
            keys = device.rollout_keys(jnp.uint32(0), jnp.int32(0), update, number)
            carry, policy = actors.carry, AGENT.policy(learner)
            actors, columns, _ = device.collect(AGENT, ENV, policy, actors, params, keys, SIZES.num_steps)
            batch = Batch(**columns, carry=carry, keys=keys, key=keys[0], progress=jnp.float32(0.5))
            learner, _, rows = AGENT.prepare(learner, batch, WHOLE)
            seen = batch.reward, batch.terminated | batch.truncated, batch.extras["seed"]
            return (learner, actors), (seen, rows, learner.local.episode_return)

        return learner, jax.lax.scan(generation, (learner, actors), jnp.arange(12))[1]

    return jax.jit(run)(jax.random.key(0))


def test_an_episode_keeps_its_perturbation_to_the_end_across_generations(generations):
    _, ((_, ended, seeds), _, _) = generations
    ended, seeds = (np.asarray(x).reshape(-1, *x.shape[2:]) for x in (ended, seeds))
    drawn = set()
    for b in range(SIZES.num_envs):
        for t in range(1, len(seeds)):
            if not ended[t - 1, b]:
                assert (seeds[t, b] == seeds[t - 1, b]).all()
        drawn |= {tuple(seed) for seed in seeds[:, b]}
    assert len(drawn) > 8 * SIZES.num_envs  # and most generations brought each env a new one
    assert not ended.reshape(12, SIZES.num_steps, -1).any(1).all()  # some episodes outlasted one


def test_fitness_is_the_return_of_whole_episodes_under_one_perturbation(generations):
    """Against a diary of each env: (seed, return) of every episode, in the generation in which it ended."""
    _, ((rewards, ended, seeds), rows, open_returns) = jax.tree.map(np.asarray, generations)
    running = np.zeros(SIZES.num_envs)
    for g in range(12):
        diary = [[] for _ in running]
        for t in range(SIZES.num_steps):
            running += rewards[g, t]
            for b in np.flatnonzero(ended[g, t]):
                diary[b].append((tuple(seeds[g, t, b]), running[b]))
                running[b] = 0
        seed, fitness, valid = (
            x[g, 0].reshape(2, SIZES.num_envs, -1) for x in (rows.seed, rows.fitness, rows.valid)
        )
        for b, episodes in enumerate(diary):
            assert valid[:, b, 0].tolist() == [len(episodes) > 0, len(episodes) > 1]
            for i, part in enumerate((episodes[:1], episodes[1:])):
                if part:
                    assert {its for its, _ in part} == {tuple(seed[i, b])}
                    mean = np.mean([value for _, value in part])
                    np.testing.assert_allclose(fitness[i, b, 0], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(open_returns[g], running, rtol=1e-4, atol=1e-5)


# --- Ranks ------------------------------------------------------------------------------------


def test_ranks_are_centred_over_the_valid_and_equals_share_theirs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        fitness, valid = rng.integers(-3, 4, 9).astype(np.float32), rng.random(9) < 0.7
        lead, scale = es._centred_ranks(jnp.asarray(fitness), jnp.asarray(valid), WHOLE)
        n = valid.sum()
        want = np.zeros(9)
        want[valid] = (rankdata(fitness[valid]) - 1) / max(n - 1, 1) - (0.5 if n > 1 else 0)
        np.testing.assert_allclose(lead * scale, want, atol=1e-6)


@pytest.mark.parametrize("valid", [[], [2]])
def test_one_perturbation_or_none_has_nothing_to_say(valid):
    mask = jnp.zeros(4, bool).at[jnp.asarray(valid, int)].set(True)
    lead, scale = es._centred_ranks(jnp.asarray([1.0, jnp.nan, 5.0, 3.0]), mask, WHOLE)
    assert lead.tolist() == [0] * 4
    assert np.isfinite(scale)


def test_a_generation_that_ends_no_episode_changes_nothing():
    env = ENV._replace(time_limit=0)
    never = jax.tree.map(lambda x: jnp.zeros_like(x)[None], probes.Walk(0.0, 0.0))
    state, _ = probes.train(env, es, SIZES, Knobs(), 2, 1, never)
    fresh = AGENT.init(jax.random.key(0), Knobs())
    assert state.learner.adam.count == fresh.adam.count == 0
    assert np.abs(state.learner.local.episode_return).min() > 0


# --- Gradient ---------------------------------------------------------------------------------


def test_the_slope_is_the_sum_of_written_out_perturbations_times_ranks(generations):
    learner, (_, rows, _) = generations
    rows = lane(lane(rows, 5), 0)
    numerator, count, outputs = jax.jit(AGENT.grad)(learner, (), rows)
    one = Policy(jax.tree.map(jnp.zeros_like, learner.params), 1.0)
    want = [(np.zeros(w.shape), np.zeros(b.shape)) for w, b in dense(one, rows.seed[0])]
    for seed, weight in zip(rows.seed, np.asarray(rows.lead * rows.scale)):
        want = [(w - weight * dw, b - weight * db) for (w, b), (dw, db) in zip(want, dense(one, seed))]
    for layer, (weight, bias) in zip(numerator, want):
        np.testing.assert_allclose(layer.weight, weight, atol=1e-5)
        np.testing.assert_allclose(layer.bias, bias, atol=1e-5)
    assert count == rows.valid.sum() > 1
    np.testing.assert_allclose(outputs.metrics["fitness"], rows.fitness.sum(), rtol=1e-5)


def test_the_slope_points_uphill():
    """Of a fitness that grows along one weight and one bias."""
    some = SEEDS[:1000]
    parts = jax.vmap(partial(es._signs, LAYERS))(some)
    fitness = parts[0].u[:, 1] * parts[0].v[:, 0] + 0.1 * parts[1].w[:, 2]
    valid = jnp.ones(len(some), bool)
    ranks = jax.jit(partial(es._centred_ranks, axis=WHOLE))(fitness, valid)
    learner = AGENT.init(jax.random.key(0), Knobs())._replace(params=LAYERS)
    gradient, _, _ = jax.jit(es._grad)(learner, es.Rows(some, *ranks, fitness, valid.astype(jnp.float32)))
    slope = -np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)]) / len(some)
    uphill = np.argsort(-slope)[:2]
    names = np.concatenate([np.full(x.size, i) for i, x in enumerate(jax.tree.leaves(gradient))])
    assert names[uphill].tolist() == [0, 3]  # the first layer's weights, the last layer's biases
    np.testing.assert_allclose(slope[uphill[0]], 0.25, atol=0.05)


@pytest.mark.parametrize(("anneal", "progress", "share"), [(True, 0.25, 0.75), (True, 1, 0), (False, 0.9, 1)])
def test_the_learning_rate_falls_linearly_to_0_where_annealed_and_sigma_stays(anneal, progress, share):
    """Adam's first step is as long as its rate."""
    agent = probes.agent_for(ENV, es, Sizes(num_envs=6, num_steps=4, hidden=(5,), anneal=anneal))
    learner = agent.init(jax.random.key(0), Knobs(lr=0.1, sigma=0.3))
    learner = learner._replace(progress=jnp.float32(progress))
    after = agent.apply(learner, jax.tree.map(jnp.ones_like, learner.params), Outputs({}))
    close = lambda new, old: np.testing.assert_allclose(new, old - 0.1 * share, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, after.params, learner.params)
    np.testing.assert_allclose(agent.policy(after).sigma, 0.3, rtol=1e-6)


# --- Placement, sizes, networks ---------------------------------------------------------------


def test_two_devices_equal_one():
    start = probes.alone(ENV, es, SIZES, Knobs())
    one, two = (probes.placed(ENV, es, SIZES, start, shards) for shards in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, two)
    assert one[0].learner.adam.count == 3


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ShoalError, match=r"--es.num_steps 0 must be from 1"):
        Sizes(num_steps=0)
    with pytest.raises(ShoalError, match="leaves nothing to compare"):
        Sizes(num_envs=1)
    assert Sizes(num_envs=12).strata == 12


def test_networks_whose_layers_are_not_known_are_refused():
    image, plain = Box(0, 255, (6, 6, 1), np.uint8), house_net("mlp", (5,), "tanh")
    for space, net in (
        (image, house_net("auto", (5,), "tanh")),
        (Box(-1, 1, (2,)), lambda *args: plain(*args)),
    ):
        with pytest.raises(ShoalError, match="the house's mlp") as error:
            es.make(space, Discrete(2), SIZES, net)
        assert error.value.hint == "use --net mlp"
    es.make(image, Discrete(2), SIZES, plain)


def test_every_knob_is_worth_a_search():
    assert set(es.SEARCH) == set(Knobs._fields)


def test_the_carry_of_a_fresh_episode_is_begun_by_its_first_step():
    policy = Policy(LAYERS, jnp.float32(0.1))
    carry, noise = Carry(jnp.arange(4, dtype=jnp.uint32).reshape(2, 2), jnp.asarray([True, False])), SEEDS[:2]
    after, _, extras = AGENT.act(policy, carry, jnp.zeros((2, 2)), None, noise)
    np.testing.assert_array_equal(after.seed, [[0, 1], noise[1]])
    np.testing.assert_array_equal(extras["seed"], after.seed)
    assert after.begun.all()


# --- Learning ---------------------------------------------------------------------------------

CLIMBING = Sizes(num_envs=64, num_steps=4, hidden=(16,))


class TestLadder(ladder.Acting, ladder.Masked):
    climber = Climber(es, CLIMBING, Knobs(lr=0.1, sigma=0.1), 60)


class TestContinuousActions(ladder.Acting):
    climber = Climber(es, CLIMBING, Knobs(lr=0.1, sigma=0.1), 60, continuous=True, score=0.8)
