"""Networks as (init, apply) pairs over Equinox layers; apply takes a batch of observations of one agent."""

import difflib
import math
from collections.abc import Callable

import jax

from shoal.errors import ShoalError
from shoal.nets.inputs import has_images
from shoal.types import Net, Space

# (obs_space, outputs, scale of the last layer's orthogonal init) -> (init, apply)
NetMaker = Callable[[Space, int, float], Net]

ACTIVATIONS = {
    "tanh": jax.numpy.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "elu": jax.nn.elu,
}
HIDDEN_GAIN = math.sqrt(2.0)
WIDEST = 2**20  # units of one layer


def check_layers(hidden: tuple[int, ...], activation: str) -> None:
    """ShoalError unless the house's networks can be made of these."""
    if not all(1 <= units <= WIDEST for units in hidden):
        shown = ",".join(map(str, hidden))
        raise ShoalError(f"hidden = {shown}: a layer has 1 to {WIDEST:,} units", "for example 64,64")
    if activation not in ACTIVATIONS:
        near = difflib.get_close_matches(activation, ACTIVATIONS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ShoalError(f"no activation is called {activation!r}", f"{hint}use {', '.join(ACTIVATIONS)}")


def house_net(kind: str, hidden: tuple[int, ...], activation: str, layer_norm: bool = False) -> NetMaker:
    """A maker of the house's own networks: `mlp`, `cnn`, or `auto` (cnn where an image is observed).

    `layer_norm` normalises every hidden layer before its activation.
    """
    from shoal.nets import cnn, mlp

    makers = {"mlp": mlp.make, "cnn": cnn.make}
    if kind not in (*makers, "auto"):
        raise ShoalError(f"no network is called {kind!r}", f"use auto, {', '.join(makers)} or module:make")

    def make(obs_space: Space, outputs: int, scale: float) -> Net:
        chosen = ("cnn" if has_images(obs_space) else "mlp") if kind == "auto" else kind
        return makers[chosen](obs_space, outputs, scale, hidden, activation, layer_norm)

    return make
