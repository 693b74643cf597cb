"""How a population is laid over devices: agents first, then one agent's envs.

Agents need no communication; envs and minibatch rows of one agent (`data`) meet in one sum per minibatch.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from shoal.errors import ShoalError
from shoal.types import WHOLE, Axis

AGENT, DATA = AXES = "agent", "data"
HOW = "write how many devices each axis takes: agent=2,data=2, or auto"
ROWS_IN_CACHE = 512  # of one agent at a time
LANE_ROWS = 1024  # of all agents that train at a time


class Layout(NamedTuple):
    mesh: Mesh  # axes `agent` and `data`
    agents: int
    lanes: int  # agents, padded so that the agent axis divides them

    @property
    def agent_shards(self) -> int:
        return self.mesh.shape[AGENT]

    @property
    def data_shards(self) -> int:
        return self.mesh.shape[DATA]

    @property
    def rows_at_once(self) -> int:
        """Rows of a minibatch that one agent's gradient is computed for at a time; 0 = all of them.

        Measured in docs/performance.md: on a CPU what they leave behind should stay in a core's cache, on an
        accelerator more rows fill it better.
        """
        return ROWS_IN_CACHE if self.mesh.devices.flat[0].platform == "cpu" else 0

    def lanes_at_once(self, rows: int) -> int:
        """Agents of one device to train at a time; each one's minibatches have `rows` rows here. 0 = all."""
        return max(1, LANE_ROWS // min(rows, self.rows_at_once)) if self.rows_at_once else 0

    def axis(self) -> Axis:
        """The data axis, as seen from inside the program of one device."""
        if self.data_shards == 1:
            return WHOLE
        total = lambda tree: jax.lax.psum(tree, DATA)
        return Axis(sum=total, index=jax.lax.axis_index(DATA), size=self.data_shards)


def read_mesh(text: str) -> dict[str, int]:
    """Devices per axis from `agent=2,data=2`; those of `auto` are for `lay_out` to choose, so {}."""
    shape: dict[str, int] = {}
    for part in text.split(",") if text.strip() != "auto" else ():
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if not match:
            raise ShoalError(f"--mesh {text} cannot be read", HOW)
        name, number = match[1], int(match[2])
        if name not in AXES:
            raise ShoalError(f"--mesh {text}: there is no axis {name}", f"the axes are {', '.join(AXES)}")
        if name in shape or not number:
            what = f"{name} is given twice" if name in shape else f"{name} takes at least one device"
            raise ShoalError(f"--mesh {text}: {what}", HOW)
        shape[name] = number
    return shape


def lay_out(
    devices: tuple[jax.Device, ...], agents: int, strata: int, shape: Mapping[str, int] | None = None
) -> Layout:
    """Lay agents over the mesh that `shape` asks for, or that uses as many devices as divide the work.

    Agents are sharded first, then strata of one agent's envs. `strata` is the number of groups that an
    agent's envs can be divided into without changing its minibatches. ShoalError for a mesh that cannot be.
    """
    if shape:
        agent_shards, data_shards = (shape.get(name, 1) for name in AXES)
        _refuse(shape, len(devices), agents, strata)
    else:
        per_device = -(-agents // min(agents, len(devices)))
        agent_shards = -(-agents // per_device)  # no more devices than that take: fewer padding lanes
        data_shards = max(s for s in range(1, len(devices) // agent_shards + 1) if strata % s == 0)
    used = devices[: agent_shards * data_shards]
    mesh = jax.make_mesh(
        (agent_shards, data_shards), (AGENT, DATA), axis_types=(AxisType.Auto,) * 2, devices=used
    )
    return Layout(mesh, agents, -(-agents // agent_shards) * agent_shards)


def _refuse(shape: Mapping[str, int], devices: int, agents: int, strata: int) -> None:
    """ShoalError where so many devices, agents or strata do not make this mesh."""
    asked = "--mesh " + ",".join(f"{name}={number}" for name, number in shape.items())
    if (needed := math.prod(shape.values())) > devices:
        raise ShoalError(f"{asked} takes {needed} devices, and there are {devices}", f"--devices {needed}")
    if (shards := shape.get(AGENT, 1)) > agents:
        raise ShoalError(f"{asked} is for {shards} agents or more, and there are {agents}", f"agent={agents}")
    if strata % (shards := shape.get(DATA, 1)):
        fit = ", ".join(str(n) for n in range(1, strata + 1) if strata % n == 0)
        raise ShoalError(
            f"{asked}: an agent's envs cannot be divided into {shards} without changing its minibatches",
            f"data may be {fit}",
        )
