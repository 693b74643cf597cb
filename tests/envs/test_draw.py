"""Pictures of the built-in envs: right type, something on them, and it moves."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.envs import draw, spaces

pytestmark = pytest.mark.usefixtures("quick_compiles")
NAMES = ["cartpole", "acrobot", "mountaincar", "mountaincar_continuous", "pendulum", "breakout"]


@pytest.mark.parametrize("name", NAMES)
def test_pictures_show_the_state(name):
    env = importlib.import_module(f"shoal.envs.{name}").make()
    params = env.default_params()

    def body(state, key):
        action = spaces.sample(key, env.action_space(params))
        return env.step(key, state, action, params).state, env.render(state, params)

    state, _ = env.reset(jax.random.key(0), params)
    _, film = jax.jit(lambda s: jax.lax.scan(body, s, jax.random.split(jax.random.key(1), 10)))(state)
    assert film.dtype == jnp.uint8
    assert film.shape == (10, 160, 160 if name == "breakout" else 240, 3)
    for frame in (film[0], film[-1]):
        assert len(np.unique(frame.reshape(-1, 3), axis=0)) >= 5  # colours
        assert np.median(frame) > 200  # on a light background
    assert (film[0] != film[-1]).any()


def test_shapes_cover_their_area():
    """In world units: a disc π r², a line 2 r · length + π r², a rectangle its sides; edges are soft."""
    paper = draw.canvas(-3, 3, -2)
    shapes = {
        np.pi * 0.5**2: draw.disc(paper, (0.3, 0.2), 0.5, draw.INK),
        0.4 * 2 + np.pi * 0.2**2: draw.line(paper, (-1.0, 0.0), (1.0, 0.0), 0.2, draw.INK),
        2.0 * 1.0: draw.box(paper, (0.0, 0.0), (1.0, 0.5), draw.INK),
        2.0 * 1.0 - (4 - np.pi) * 0.2**2: draw.box(paper, (0.0, 0.0), (1.0, 0.5), draw.INK, corner=0.2),
    }
    for area, drawn in shapes.items():
        coverage = (paper.rgb - drawn.rgb)[..., 0] / (draw.PAPER[0] - draw.INK[0])
        np.testing.assert_allclose(coverage.sum() * paper.pixel**2, area, rtol=0.01)


def test_up_is_up():
    view = draw.disc(draw.canvas(-3, 3, -2), (2.0, 1.0), 0.1, draw.INK)
    row, column = np.argwhere(np.asarray(draw.pixels(view))[..., 0] == draw.INK[0]).mean(0)
    assert (row, column) == pytest.approx((draw.HEIGHT / 4, draw.WIDTH * 5 / 6), abs=1)
