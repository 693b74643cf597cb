"""Break bricks with a ball and a paddle on a 10 × 10 grid.

Source: Young & Tian (2019), MinAtar's Breakout with its minimal action set: https://github.com/kenjyoung/MinAtar
Differs in the sticky action only: the first action of an episode may stick to a no-op, where MinAtar
sticks to the last action of the episode before. Past an end the ball falls on, out of sight.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.envs import draw
from shoal.envs.params import as_arrays
from shoal.types import Array, Box, Discrete, Env, Key, Step

SIZE = 10
ROW, COLUMN = np.mgrid[:SIZE, :SIZE]
WALL = (ROW >= 1) & (ROW <= 3)  # the bricks of a fresh wall
TILE = 16  # pixels of a cell in a picture
SEAM = (238, 234, 226)  # the lines between cells


class Params(NamedTuple):
    sticky_prob: float = 0.1  # chance that the action before is repeated instead


class State(NamedTuple):
    ball_x: Array  # int32 column
    ball_y: Array  # int32 row, 0 = top
    direction: Array  # int32; 0: up left, 1: up right, 2: down right, 3: down left
    paddle: Array  # int32 column
    bricks: Array  # bool [10, 10]
    strike: Array  # bool, the ball is inside the wall: it breaks one brick per visit
    last_x: Array  # int32, where the ball was
    last_y: Array
    last_action: Array  # int32


def reset(key: Key, params: Params) -> tuple[State, Array]:
    """A fresh wall; the ball comes down from the left or the right edge."""
    right = jax.random.bernoulli(key).astype(jnp.int32)
    x, y = 9 * right, jnp.int32(3)
    state = State(x, y, 2 + right, jnp.int32(4), jnp.asarray(WALL), jnp.bool_(False), x, y, jnp.int32(0))
    return state, _obs(state)


def step(key: Key, state: State, action: Array, params: Params) -> Step:
    """Stay, left or right (0, 1, 2); reward 1 per brick; ends when the ball reaches the bottom row."""
    action = jnp.where(jax.random.bernoulli(key, params.sticky_prob), state.last_action, action)
    paddle = jnp.clip(state.paddle + (action == 2) - (action == 1), 0, SIZE - 1)
    direction = state.direction
    x = state.ball_x + jnp.where((direction == 0) | (direction == 3), -1, 1)
    y = state.ball_y + jnp.where(direction < 2, -1, 1)

    # Directions are numbered around the clock: ^ 1 mirrors left and right, 3 - mirrors up and down.
    at_side = (x < 0) | (x >= SIZE)
    x = jnp.clip(x, 0, SIZE - 1)
    direction = jnp.where(at_side, direction ^ 1, direction)

    at_top = y < 0
    y = jnp.maximum(y, 0)
    at_ball = _at(y, x)
    in_brick = ~at_top & jnp.any(state.bricks & at_ball)
    breaks = in_brick & ~state.strike
    bricks = state.bricks & ~(at_ball & breaks)

    at_bottom = y == SIZE - 1
    bricks = bricks | (at_bottom & ~bricks.any() & WALL)
    on_paddle = at_bottom & (state.ball_x == paddle)  # bounces straight up
    on_corner = at_bottom & ~on_paddle & (x == paddle)  # bounces back where it came from
    direction = jnp.where(at_top | breaks | on_paddle, 3 - direction, direction)
    direction = jnp.where(on_corner, direction ^ 2, direction)
    y = jnp.where(breaks | on_paddle | on_corner, state.ball_y, y)
    terminated = at_bottom & ~on_paddle & ~on_corner

    state = State(x, y, direction, paddle, bricks, in_brick, state.ball_x, state.ball_y, action)
    return Step(state, _obs(state), breaks.astype(jnp.float32), terminated, jnp.bool_(False), {})


def obs_space(params: Params) -> Box:
    """Channels: paddle, ball, trail (where the ball was), bricks."""
    return Box(False, True, (SIZE, SIZE, 4), bool)


def action_space(params: Params) -> Discrete:
    return Discrete(3)


def render(state: State, params: Params) -> Array:
    """The grid, uint8 [160, 160, 3], the rows of bricks in three colours."""
    wall = np.array([draw.GOLD, draw.GREEN, draw.BLUE])[(ROW - 1) % 3]
    layers = [
        (state.bricks, wall),
        (_at(state.last_y, state.last_x), draw.STONE),
        (_at(state.ball_y, state.ball_x), draw.CORAL),
        (_at(jnp.int32(SIZE - 1), state.paddle), draw.INK),
    ]
    cells = jnp.asarray(np.broadcast_to(draw.PAPER, wall.shape))
    for mask, colour in layers:
        cells = jnp.where(mask[..., None], np.broadcast_to(colour, wall.shape), cells)
    picture = cells.repeat(TILE, axis=0).repeat(TILE, axis=1)
    seam = np.add.outer(*2 * [np.arange(SIZE * TILE) % TILE == 0])[..., None]
    return jnp.where(seam, np.broadcast_to(SEAM, picture.shape), picture).astype(jnp.uint8)


def make() -> Env:
    return Env("breakout", lambda: as_arrays(Params()), reset, step, obs_space, action_space, render=render)


def _at(y: Array, x: Array) -> Array:
    """bool [10, 10]: one cell; a comparison is cheaper than a scatter under vmap."""
    return (y == ROW) & (x == COLUMN)


def _obs(state: State) -> Array:
    y = jnp.stack([jnp.int32(SIZE - 1), state.ball_y, state.last_y]).reshape(1, 1, 3)
    x = jnp.stack([state.paddle, state.ball_x, state.last_x]).reshape(1, 1, 3)
    cells = (y == ROW[..., None]) & (x == COLUMN[..., None])  # all at once: 1.6 times as fast as one by one
    return jnp.concatenate([cells, state.bricks[..., None]], axis=-1)
