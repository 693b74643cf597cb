"""The recurrent network against Equinox's cell, step by step, and its hand-made derivative."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.errors import ShoalError
from shoal.nets import house_net, recurrent
from shoal.types import Box

T, B, H = 6, 3, 5
NET = recurrent.make(house_net("auto", (4,), "tanh"), Box(-1, 1, (2,)), 3, 1.0, H)
PARAMS = jax.tree.map(lambda x: x + 0.3, jax.jit(NET.init)(jax.random.key(0)))
OBS = jax.random.normal(jax.random.key(1), (T, B, 2))
START = jax.random.normal(jax.random.key(2), (B, H))
FRESH = jnp.zeros((T, B), bool).at[2, 0].set(True).at[0, 1].set(True).at[T - 1, 1].set(True)


def slow(params, carry, obs, fresh):
    """One step after another."""
    rows = []
    for t in range(len(obs)):
        carry = jnp.where(fresh[t][:, None], NET.carry(), carry)
        after, outputs = NET.step(params, carry, obs[t])
        rows.append((carry, after, outputs))
        carry = after
    return tuple(map(jnp.stack, zip(*rows)))


def test_unrolling_equals_stepping_with_memory_dropped_at_fresh_steps():
    for fast, one in zip(jax.jit(NET.unroll)(PARAMS, START, OBS, FRESH), slow(PARAMS, START, OBS, FRESH)):
        np.testing.assert_allclose(fast, one, atol=1e-6)


def test_the_cell_is_equinoxs():
    cell = eqx.nn.GRUCell(3 * H, H, key=jax.random.key(0))
    inputs, state = (jax.random.normal(jax.random.key(i), (B, n)) for i, n in ((3, 3 * H), (4, H)))
    projected = inputs @ cell.weight_ih.T + cell.bias
    got, _ = recurrent._cell(cell.weight_hh.T, cell.bias_n, projected, state)
    np.testing.assert_allclose(got, jax.vmap(cell)(inputs, state), atol=1e-6)


def test_the_derivative_is_that_of_the_slow_loop():
    """Through every output and every argument."""
    weights = [jax.random.normal(jax.random.key(i), (T, B, n)) for i, n in enumerate((H, H, 3))]

    def total(unroll):
        def of(params, carry, obs):
            return sum(jnp.vdot(w, x) for w, x in zip(weights, unroll(params, carry, obs, FRESH)))

        return jax.jit(jax.grad(of, (0, 1, 2)))(PARAMS, START, OBS)

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, total(NET.unroll), total(slow))


def test_gates_start_orthogonal_and_the_state_empty():
    weight = jax.jit(NET.init)(jax.random.key(0)).weight.reshape(3, H, H)
    for gate in weight:
        np.testing.assert_allclose(gate @ gate.T, np.eye(H), atol=1e-4)
    assert NET.carry().tolist() == [0] * H


def test_what_the_gates_get_is_at_first_as_long_on_average_as_what_is_encoded():
    net = recurrent.make(house_net("auto", (), "tanh"), Box(-1, 1, (2,)), 3, 1.0, H)
    (layer,) = jax.jit(net.init)(jax.random.key(0)).encoder
    seen = np.random.default_rng(0).normal(size=(7, 2))
    gates = (seen @ layer.weight.T).reshape(7, 3, H)
    np.testing.assert_allclose((gates**2).sum(2).mean(1), (seen**2).sum(1), rtol=1e-4)


def test_what_was_seen_is_remembered_within_an_episode_only():
    other = OBS.at[0].add(1.0)
    *_, one = NET.unroll(PARAMS, START, OBS, FRESH)
    *_, two = NET.unroll(PARAMS, START, other, FRESH)
    differs = np.abs(np.asarray(one - two)).max(-1) > 1e-6
    assert differs.all(0).tolist() == [False, False, True]
    assert differs[:, 0].tolist() == [True, True] + [False] * 4
    assert differs[:, 1].tolist() == [True] * 5 + [False]


def test_a_recurrent_layer_has_units():
    with pytest.raises(ShoalError, match="units = 0"):
        recurrent.check_units(0)
