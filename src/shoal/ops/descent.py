"""One optimiser step on a gradient clipped by its global norm."""

import jax
import jax.numpy as jnp
import optax

from shoal.types import Array, Params


def descend(
    rule: optax.GradientTransformation,
    state: optax.OptState,
    params: Params,
    gradient: Params,
    lr: Array | float,
    max_grad_norm: Array | float,
) -> tuple[Params, optax.OptState]:
    """Parameters and optimiser state after a step of size `lr` along what `rule` makes of the gradient.

    The gradient is first scaled down to `max_grad_norm` over all parameters together; inf leaves it as it is.
    """
    norm = optax.tree.norm(gradient)
    scale = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
    steps, state = rule.update(jax.tree.map(lambda g: scale * g, gradient), state)
    return jax.tree.map(lambda p, step: p - lr * step, params, steps), state
