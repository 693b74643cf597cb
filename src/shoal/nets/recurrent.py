"""A network with memory: any network, then a gated recurrent unit, then one linear layer.

Cho et al. 2014, arXiv:1406.1078, with the reset gate behind the product, as cuDNN has it. The network's last
layer is the unit's input projection, so that all steps of a rollout pass through it at once; the loop over
time does nothing but what depends on the step before.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.errors import ShoalError
from shoal.nets import WIDEST, NetMaker
from shoal.nets.mlp import Layers, forward, stack
from shoal.ops.init import orthogonals
from shoal.types import Array, Key, Net, Params, Space, Tree


class RecurrentNet(NamedTuple):
    init: Callable[[Key], Params]
    carry: Callable[[], Array]  # the state before an episode's first step, float32 [H]
    step: Callable[
        [Params, Array, Tree], tuple[Array, Array]
    ]  # (params, carry [B], obs [B]) -> (carry, outputs)
    # (params, carry [B, H], obs [T, B, …], fresh [T, B]: first steps of episodes) -> each step's state before
    # and after it [T, B, H], and outputs [T, B, outputs]; a carry into a fresh step is dropped
    unroll: Callable[[Params, Array, Tree, Array], tuple[Array, Array, Array]]


class Recurrent(NamedTuple):
    """Its parameters."""

    encoder: Tree
    weight: Array  # [3 H, H], of the reset and update gates and the candidate
    bias: Array  # [H], of the candidate's product with the state
    head: Layers


def check_units(units: int) -> None:
    if not 1 <= units <= WIDEST:
        raise ShoalError(f"units = {units}: a recurrent layer has 1 to {WIDEST:,}", "for example 64")


def make(net: NetMaker, obs_space: Space, outputs: int, scale: float, units: int) -> RecurrentNet:
    """`units` is H; `scale` is that of the last layer's orthogonal weights."""
    encoder = Net(
        *net(obs_space, 3 * units, math.sqrt(3.0))
    )  # each gate's share keeps lengths about the same

    def init(key: Key) -> Recurrent:
        encoder_key, unit_key, head_key = jax.random.split(key, 3)
        weight = jnp.concatenate(orthogonals(unit_key, [(units, units)] * 3, [1.0] * 3))
        head = stack(head_key, units, (), outputs, scale)
        return Recurrent(encoder.init(encoder_key), weight, jnp.zeros((units,), jnp.float32), head)

    def read(params: Recurrent, states: Array) -> Array:
        flat = forward(params.head, states.reshape(-1, units), "tanh")  # one layer: nothing is activated
        return flat.reshape(*states.shape[:-1], -1)

    def step(params: Recurrent, carry: Array, obs: Tree) -> tuple[Array, Array]:
        carry = _cell(params.weight.T, params.bias, encoder.apply(params.encoder, obs), carry)[0]
        return carry, read(params, carry)

    def unroll(params: Recurrent, carry: Array, obs: Tree, fresh: Array) -> tuple[Array, Array, Array]:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
        inputs = encoder.apply(params.encoder, flat).reshape(*fresh.shape, -1)
        before, after = scan(params.weight, params.bias, inputs, carry, fresh)
        return before, after, read(params, after)

    return RecurrentNet(init, lambda: jnp.zeros((units,), jnp.float32), step, unroll)


# --- The loop over time -----------------------------------------------------------------------


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)  # faster on a CPU than by the exponential


def _cell(across: Array, bias: Array, inputs: Array, state: Array):
    """The next state [B, H] of inputs [B, 3 H], and what its derivative needs; `across` is weight.T."""
    units = state.shape[-1]
    product = state @ across
    reset = _sigmoid(inputs[:, :units] + product[:, :units])
    update = _sigmoid(inputs[:, units : 2 * units] + product[:, units : 2 * units])
    memory = product[:, 2 * units :] + bias
    candidate = jnp.tanh(inputs[:, 2 * units :] + reset * memory)
    return candidate + update * (state - candidate), (reset, update, memory, candidate)


def _forwards(weight: Array, bias: Array, inputs: Array, carry: Array, fresh: Array):
    across = weight.T  # once: few rows times a matrix that lies the other way take three times as long

    def one(state, row):
        inputs, fresh = row
        state = jnp.where(fresh[:, None], 0.0, state)
        after, parts = _cell(across, bias, inputs, state)
        return after, (state, after, parts)

    _, (before, after, parts) = jax.lax.scan(one, carry, (inputs, fresh))
    return (before, after), (weight, before, parts, fresh)


@jax.custom_vjp
def scan(weight: Array, bias: Array, inputs: Array, carry: Array, fresh: Array) -> tuple[Array, Array]:
    """States before and after each step [T, B, H], of inputs [T, B, 3 H].

    Derived by hand, since the weights' gradient is then one product over all steps, where automatic
    differentiation adds one up per step: up to twice as fast on a CPU.
    """
    return _forwards(weight, bias, inputs, carry, fresh)[0]


def _backwards(saved, cotangents):
    weight, before, parts, fresh = saved

    def one(d_after, row):
        d_before, d_output, state, (reset, update, memory, candidate), fresh = row
        d_after = d_after + d_output
        d_candidate = d_after * (1 - update) * (1 - jnp.square(candidate))
        d_update = d_after * (state - candidate) * update * (1 - update)
        d_reset = d_candidate * memory * reset * (1 - reset)
        d_product = jnp.concatenate([d_reset, d_update, d_candidate * reset], -1)
        d_state = d_after * update + d_product @ weight + d_before
        return jnp.where(fresh[:, None], 0.0, d_state), (d_product, d_candidate)

    rows = (*cotangents, before, parts, fresh)
    d_carry, (d_product, d_candidate) = jax.lax.scan(one, jnp.zeros_like(before[0]), rows, reverse=True)
    units = before.shape[-1]
    d_weight = jnp.einsum("tbi,tbj->ij", d_product, before)
    d_bias = jnp.sum(d_product[..., 2 * units :], (0, 1))
    d_inputs = jnp.concatenate([d_product[..., : 2 * units], d_candidate], -1)
    return d_weight, d_bias, d_inputs, d_carry, None


scan.defvjp(_forwards, _backwards)
