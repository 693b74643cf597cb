"""Any observation space becomes float rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from shoal.errors import ShoalError
from shoal.nets.inputs import has_images, image, image_shape, vector, vector_size
from shoal.types import Box, Discrete, MultiDiscrete

TREE = {
    "camera": Box(0, 255, (4, 4, 3), np.uint8),
    "gear": Discrete(3),
    "joints": Box(-1.0, 1.0, (2,)),
    "switches": MultiDiscrete((2, 3)),
    "temperature": Box(-1.0, 1.0),
}


def obs(rows=2):
    rng = np.random.default_rng(0)
    return {
        "camera": jnp.asarray(rng.integers(0, 256, (rows, 4, 4, 3)), jnp.uint8),
        "gear": jnp.asarray([2, 0], jnp.int32),
        "joints": jnp.asarray([[0.5, -0.5], [1.0, 0.0]]),
        "switches": jnp.asarray([[1, 0], [0, 2]], jnp.int32),
        "temperature": jnp.asarray([0.25, 0.75]),
    }


def test_integers_are_one_hot_and_leaves_stand_side_by_side_in_the_order_of_names():
    got = vector(TREE, obs(), images=False)
    want = [
        [0, 0, 1, 0.5, -0.5, 0, 1, 1, 0, 0, 0.25],
        [1, 0, 0, 1.0, 0.0, 1, 0, 0, 0, 1, 0.75],
    ]
    np.testing.assert_array_equal(got, want)
    assert got.dtype == jnp.float32
    assert vector_size(TREE, images=False) == 11


def test_bytes_are_scaled_to_the_unit_interval():
    pixels = jnp.asarray([[[0], [255]], [[51], [102]]], jnp.uint8)
    space = Box(0, 255, (2, 1), np.uint8)
    np.testing.assert_allclose(vector(space, pixels), [[0, 1], [0.2, 0.4]], rtol=1e-6)
    camera = obs()["camera"]
    np.testing.assert_allclose(image(TREE, obs()), np.asarray(camera) / 255, rtol=1e-6)


@pytest.mark.parametrize(
    "space", [Discrete(4), MultiDiscrete((2, 5)), Box(-1.0, 1.0, (2, 3)), Box(0, 9), TREE]
)
def test_vector_gives_as_many_columns_as_vector_size_says(space):
    rows = obs() if space is TREE else jnp.zeros((2, *space.shape), space.dtype)
    assert vector(space, rows).shape == (2, vector_size(space))


def test_two_images_of_one_size_become_channels_of_one():
    space = {"a": Box(0.0, 1.0, (3, 3, 2)), "b": Box(0.0, 1.0, (3, 3, 1))}
    assert image_shape(space) == (3, 3, 3)
    rows = {"a": jnp.zeros((5, 3, 3, 2)), "b": jnp.ones((5, 3, 3, 1))}
    np.testing.assert_array_equal(image(space, rows)[..., 2], 1)


def test_images_of_two_sizes_are_refused():
    with pytest.raises(ShoalError, match="one size"):
        image_shape({"a": Box(0.0, 1.0, (3, 3, 2)), "b": Box(0.0, 1.0, (4, 4, 1))})


def test_only_boxes_of_three_axes_are_images():
    assert has_images(TREE)
    assert not has_images({"a": Box(0.0, 1.0, (3, 3)), "b": Discrete(3)})
