"""Agents first, then one agent's envs, and never a device that does not divide the work."""

import jax
import numpy as np
import pytest

from shoal.errors import ShoalError
from shoal.mesh.layout import AGENT, DATA, lay_out, read_mesh
from shoal.types import WHOLE


@pytest.mark.parametrize(
    ("devices", "agents", "strata", "shape", "lanes"),
    [
        (1, 1, 4, (1, 1), 1),
        (2, 1, 4, (1, 2), 1),  # one agent: its envs are split
        (8, 1, 4, (1, 4), 1),  # no further than its strata
        (8, 1, 6, (1, 6), 1),
        (8, 1, 5, (1, 5), 1),
        (8, 1, 1, (1, 1), 1),
        (8, 2, 4, (2, 4), 2),  # both
        (8, 3, 4, (3, 2), 3),  # six of eight
        (8, 3, 3, (3, 1), 3),
        (2, 2, 4, (2, 1), 2),
        (2, 5, 4, (2, 1), 6),  # one lane of padding
        (4, 4096, 4, (4, 1), 4096),
        (8, 9, 4, (5, 1), 10),  # two lanes a device anyway, so five do
    ],
)
def test_layouts(devices, agents, strata, shape, lanes):
    layout = lay_out(tuple(jax.devices()[:devices]), agents, strata)
    assert (layout.agent_shards, layout.data_shards) == shape
    assert layout.lanes == lanes
    assert layout.agents == agents
    assert lanes % layout.agent_shards == 0
    assert strata % layout.data_shards == 0


def test_every_number_of_agents_and_devices_has_a_layout():
    for devices in range(1, 9):
        for agents in range(1, 20):
            for strata in (1, 2, 3, 4, 6, 8):
                layout = lay_out(tuple(jax.devices()[:devices]), agents, strata)
                assert agents <= layout.lanes < agents + layout.agent_shards
                assert layout.agent_shards * layout.data_shards <= devices


def test_per_agent_arrays_are_split_over_agents_only():
    layout = lay_out(tuple(jax.devices()), 2, 4)
    x = jax.device_put(np.zeros((2, 3)), jax.NamedSharding(layout.mesh, jax.P(AGENT)))
    assert {shard.data.shape for shard in x.addressable_shards} == {(1, 3)}


@pytest.mark.parametrize(("rows", "lanes"), [(1, 1024), (128, 8), (512, 2), (700, 2), (10**6, 2)])
def test_few_lanes_train_at_a_time_on_a_cpu(rows, lanes):
    """Longer minibatches come in parts of 512 rows, so that no more of them are in flight."""
    assert lay_out(tuple(jax.devices()[:2]), 16, 4).lanes_at_once(rows) == lanes


def test_one_data_shard_needs_no_collective():
    assert lay_out(tuple(jax.devices()[:2]), 2, 4).axis() is WHOLE


def test_the_data_axis_counts_and_adds_up_its_shares():
    layout = lay_out(tuple(jax.devices()[:4]), 1, 4)

    def share(x):
        axis = layout.axis()
        assert axis.size == 4
        return axis.sum({"x": x})["x"], axis.index + x * 0

    spec = jax.P(AGENT, DATA)
    program = jax.shard_map(share, mesh=layout.mesh, in_specs=spec, out_specs=spec)
    total, index = jax.block_until_ready(jax.jit(program)(np.arange(4.0, dtype=np.float32)[None]))
    assert total.tolist() == [[6.0] * 4]
    assert index.tolist() == [[0, 1, 2, 3]]


def test_a_mesh_is_read_from_what_each_axis_takes():
    assert read_mesh("agent=2, data=4") == {"agent": 2, "data": 4}
    assert read_mesh("data=2") == {"data": 2}
    assert read_mesh("auto") == {}


@pytest.mark.parametrize(
    "text", ["", "agent", "agent=-1", "agent=0", "agent=2,agent=2", "batch=2", "agent=2;data=2"]
)
def test_a_mesh_that_cannot_be_read_is_refused(text):
    with pytest.raises(ShoalError, match="--mesh") as error:
        read_mesh(text)
    assert "agent" in error.value.hint


@pytest.mark.parametrize(
    ("shape", "agents", "laid", "lanes"),
    [({"data": 2}, 4, (1, 2), 4), ({"agent": 2, "data": 2}, 3, (2, 2), 4), ({"agent": 1}, 8, (1, 1), 8)],
)
def test_the_mesh_asked_for_is_the_one_there_is(shape, agents, laid, lanes):
    layout = lay_out(tuple(jax.devices()), agents, 4, shape)
    assert (layout.agent_shards, layout.data_shards) == laid
    assert layout.lanes == lanes


@pytest.mark.parametrize(
    ("shape", "said", "hint"),
    [
        ({"agent": 4, "data": 4}, "takes 16 devices, and there are 8", "--devices 16"),
        ({"agent": 5}, "for 5 agents or more, and there are 4", "agent=4"),
        ({"data": 3}, "cannot be divided into 3", "1, 2, 4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(shape, said, hint):
    with pytest.raises(ShoalError, match=said) as error:
        lay_out(tuple(jax.devices()), 4, 4, shape)
    assert hint in error.value.hint
