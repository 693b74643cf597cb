"""Networks as (init, apply) pairs over Equinox layers; apply takes a batch of observations of one agent."""

import difflib
import math
from collections.abc import Callable
from typing import Any

import jax

from shoal.errors import ShoalError
from shoal.nets.inputs import has_images
from shoal.ops.init import lecun_normals, orthogonals
from shoal.types import Net, Space

# (obs_space, outputs, scale of the last layer's first weights) -> (init, apply)
NetMaker = Callable[[Space, int, float], Net]

ACTIVATIONS = {
    "tanh": jax.numpy.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "elu": jax.nn.elu,
}
# How first weights are drawn, and the scale of hidden layers: Andrychowicz et al. 2021; LeCun et al. 1998.
INITS = {"orthogonal": (orthogonals, math.sqrt(2.0)), "lecun": (lecun_normals, 1.0)}
WIDEST = 2**20  # units of one layer


def check_layers(hidden: tuple[int, ...], activation: str, init: str = "orthogonal") -> None:
    """ShoalError unless the house's networks can be made of these."""
    if not all(1 <= units <= WIDEST for units in hidden):
        shown = ",".join(map(str, hidden))
        raise ShoalError(f"hidden = {shown}: a layer has 1 to {WIDEST:,} units", "for example 64,64")
    for what, name, known in (("activation", activation, ACTIVATIONS), ("init", init, INITS)):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ShoalError(f"no {what} is called {name!r}", f"{hint}use {', '.join(known)}")


def house_net(
    kind: str,
    hidden: tuple[int, ...],
    activation: str,
    layer_norm: bool = False,
    init: str = "orthogonal",
) -> NetMaker:
    """A maker of the house's own networks: `mlp`, `cnn`, or `auto` (cnn where an image is observed).

    `layer_norm` normalises every hidden layer before its activation; `init` is one of INITS.
    """
    from shoal.nets import cnn, mlp

    makers = {"mlp": mlp.make, "cnn": cnn.make}
    if kind not in (*makers, "auto"):
        raise ShoalError(f"no network is called {kind!r}", f"use auto, {', '.join(makers)} or module:make")

    def make(obs_space: Space, outputs: int, scale: float) -> Net:
        chosen = ("cnn" if has_images(obs_space) else "mlp") if kind == "auto" else kind
        return makers[chosen](obs_space, outputs, scale, hidden, activation, layer_norm, init)

    return make


def net_of(kind: str, sizes: Any) -> NetMaker:
    """`house_net` as an algorithm's Sizes describe it; layer_norm and init are settings of some."""
    chosen = {name: getattr(sizes, name) for name in ("layer_norm", "init") if hasattr(sizes, name)}
    return house_net(kind, sizes.hidden, sizes.activation, **chosen)
