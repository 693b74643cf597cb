"""How a population is laid over devices: agents first, then one agent's envs.

Agents need no communication; envs and minibatch rows of one agent (`data`) meet in one sum per minibatch.
"""

from typing import NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from shoal.types import WHOLE, Axis

AGENT, DATA = "agent", "data"
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


def lay_out(devices: tuple[jax.Device, ...], agents: int, strata: int) -> Layout:
    """Use as many devices as divide the work: agents are sharded first, then strata of one agent's envs.

    `strata` is the number of groups an agent's envs can be divided into without changing its minibatches.
    """
    per_device = -(-agents // min(agents, len(devices)))
    agent_shards = -(-agents // per_device)  # no more devices than that take: fewer padding lanes
    data_shards = max(s for s in range(1, len(devices) // agent_shards + 1) if strata % s == 0)
    used = devices[: agent_shards * data_shards]
    mesh = jax.make_mesh(
        (agent_shards, data_shards), (AGENT, DATA), axis_types=(AxisType.Auto,) * 2, devices=used
    )
    return Layout(mesh, agents, -(-agents // agent_shards) * agent_shards)
