"""Networks as (init, apply) pairs over Equinox layers; apply takes a batch of observations of one agent."""

import math
from collections.abc import Callable

from shoal.errors import ShoalError
from shoal.nets.inputs import has_images
from shoal.types import Net, Space

# (obs_space, outputs, scale of the last layer's orthogonal init) -> (init, apply)
NetMaker = Callable[[Space, int, float], Net]

HIDDEN_GAIN = math.sqrt(2.0)


def house_net(kind: str, hidden: tuple[int, ...], activation: str) -> NetMaker:
    """A maker of the house's own networks: `mlp`, `cnn`, or `auto` (cnn where an image is observed)."""
    from shoal.nets import cnn, mlp

    makers = {"mlp": mlp.make, "cnn": cnn.make}
    if kind not in (*makers, "auto"):
        raise ShoalError(f"no network is called {kind!r}", f"use auto, {', '.join(makers)} or module:make")

    def make(obs_space: Space, outputs: int, scale: float) -> Net:
        chosen = ("cnn" if has_images(obs_space) else "mlp") if kind == "auto" else kind
        return makers[chosen](obs_space, outputs, scale, hidden, activation)

    return make
