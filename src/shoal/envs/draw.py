"""Small anti-aliased pictures in pure jnp, so that a whole episode renders as one compiled vmap.

Shapes are signed distances (negative inside) in world units; `fill` turns a distance into coverage of
the pixel. Colours are RGB in 0 … 255. https://iquilezles.org/articles/distfunctions2d
"""

from typing import NamedTuple

import jax.numpy as jnp

from shoal.types import Array

HEIGHT, WIDTH = 160, 240  # pixels

PAPER = (250, 248, 243)
STONE = (222, 217, 208)
INK = (58, 64, 76)
BLUE = (88, 134, 178)
CORAL = (222, 124, 98)
GREEN = (112, 163, 127)
GOLD = (226, 176, 92)


class Canvas(NamedTuple):
    x: Array  # [H, W] world coordinates of the pixel centres
    y: Array  # [H, W] upwards
    pixel: float  # world units per pixel
    rgb: Array  # [H, W, 3] float32


def canvas(left: float, right: float, bottom: float) -> Canvas:
    """An empty picture that shows the world from `left` to `right`, and upwards from `bottom`."""
    pixel = (right - left) / WIDTH
    x = left + (jnp.arange(WIDTH, dtype=jnp.float32) + 0.5) * pixel
    y = bottom + (HEIGHT - 0.5 - jnp.arange(HEIGHT, dtype=jnp.float32)) * pixel
    x, y = jnp.meshgrid(x, y)
    return Canvas(x, y, pixel, jnp.broadcast_to(_colour(PAPER), (HEIGHT, WIDTH, 3)))


def fill(canvas: Canvas, distance: Array, colour: tuple[int, int, int]) -> Canvas:
    """Paint where `distance` [H, W] is negative, with an edge one pixel wide."""
    coverage = jnp.clip(0.5 - distance / canvas.pixel, 0, 1)[..., None]
    return canvas._replace(rgb=canvas.rgb + coverage * (_colour(colour) - canvas.rgb))


def disc(canvas: Canvas, centre, radius, colour: tuple[int, int, int]) -> Canvas:
    return fill(canvas, jnp.hypot(canvas.x - centre[0], canvas.y - centre[1]) - radius, colour)


def line(canvas: Canvas, start, end, radius, colour: tuple[int, int, int]) -> Canvas:
    """A line of width 2 `radius` with round ends."""
    across, up = end[0] - start[0], end[1] - start[1]
    x, y = canvas.x - start[0], canvas.y - start[1]
    along = jnp.clip((x * across + y * up) / (across**2 + up**2), 0, 1)  # 0 at start, 1 at end
    return fill(canvas, jnp.hypot(x - along * across, y - along * up) - radius, colour)


def box(canvas: Canvas, centre, half_size, colour: tuple[int, int, int], corner: float = 0.0) -> Canvas:
    """An upright rectangle, its corners rounded by the radius `corner`."""
    x = jnp.abs(canvas.x - centre[0]) - half_size[0] + corner
    y = jnp.abs(canvas.y - centre[1]) - half_size[1] + corner
    outside = jnp.hypot(jnp.maximum(x, 0), jnp.maximum(y, 0))
    return fill(canvas, outside + jnp.minimum(jnp.maximum(x, y), 0) - corner, colour)


def pixels(canvas: Canvas) -> Array:
    """The picture as uint8 [H, W, 3]."""
    return jnp.round(canvas.rgb).astype(jnp.uint8)


def _colour(rgb: tuple[int, int, int]) -> Array:
    return jnp.asarray(rgb, jnp.float32).reshape(1, 1, 3)
