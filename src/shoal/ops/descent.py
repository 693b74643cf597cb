"""One optimiser step, and parameters that follow others."""

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
    max_grad_norm: Array | float | None = None,
) -> tuple[Params, optax.OptState]:
    """Parameters and optimiser state after a step of size `lr` along what `rule` makes of the gradient.

    The gradient is first scaled down to `max_grad_norm` over all parameters together; inf leaves it as it is,
    and None saves the work.
    """
    if max_grad_norm is not None:
        scale = jnp.minimum(1.0, max_grad_norm / (optax.tree.norm(gradient) + 1e-6))
        gradient = jax.tree.map(lambda g: scale * g, gradient)
    steps, state = rule.update(gradient, state)
    return jax.tree.map(lambda p, step: p - lr * step, params, steps), state


def warmed(lr: Array | float, share: Array | float, progress: Array) -> Array:
    """A step size that rises linearly from 0 over the first `share` of the budget; 0 leaves it as it is."""
    return lr * jnp.where(progress < share, progress / jnp.maximum(share, 1e-8), 1.0)


def follow(target: Params, params: Params, tau: Array | float) -> Params:
    """A target network after it has taken over the share `tau` of the parameters it lags behind."""
    return jax.tree.map(lambda old, new: old + tau * (new - old), target, params)
