"""Films of trained agents: a few episodes side by side, as MP4 where ffmpeg is, else as GIF."""

import shutil
import subprocess
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

from shoal.mesh.devices import MATMUL_PRECISION
from shoal.rollout import device
from shoal.types import Agent, Array, Env, Tree

FRAMES = 250  # at most: longer episodes are shown at a higher speed
STEPS = 1000  # at most
FRAMES_PER_SECOND = 25
LABEL_HEIGHT = 18


def film(path: Path, agent: Agent, env: Env, policies: Tree, env_params: Tree, labels: list[str]) -> Path:
    """Film the first evaluation episode of each policy (leaves led by as many as there are labels).

    Returns the file written: `path` with the ending of the format that this machine can write.
    """
    limit = min(env.time_limit or STEPS, STEPS)
    with jax.default_matmul_precision(MATMUL_PRECISION):
        states, lengths = jax.jit(jax.vmap(partial(_episode, agent, env, limit)))(policies, env_params)
    lengths = np.asarray(lengths)
    steps = int(lengths.max())
    times = np.arange(0, steps, max(1, -(-steps // FRAMES)))
    shown = np.minimum(times[:, None], lengths - 1)  # [frames, agents]: an ended episode stays at its end
    frames = _draw(env, states, env_params, shown)
    width, height = frames.shape[3], frames.shape[2] + LABEL_HEIGHT
    canvas = np.full((len(times), height + height % 2, width * len(labels), 3), 255, np.uint8)
    canvas = canvas[:, :, : canvas.shape[2] - canvas.shape[2] % 2]
    for i, label in enumerate(labels):
        left = slice(i * width, (i + 1) * width)
        part = canvas[:, LABEL_HEIGHT : LABEL_HEIGHT + frames.shape[2], left]
        part[...] = frames[:, i, :, : part.shape[2]]
        canvas[:, :LABEL_HEIGHT, left] = _label(label, width)[:, : part.shape[2]]
    return _write(path, canvas)


def _episode(agent: Agent, env: Env, limit: int, policy: Tree, params: Tree) -> tuple[Tree, Array]:
    """Every state of one greedy episode [T, …], and its length."""
    start_keys, _, world_keys = device.evaluation_keys(0, jnp.arange(1))  # a batch of one throughout
    state, obs = jax.vmap(env.reset, (0, None))(start_keys, params)

    def step(scanned, time):
        state, obs, carry, length, over = scanned
        mask = device.masks(env, state, params)
        carry, action, _ = agent.act(policy, carry, obs, mask, None)
        after = device.advance(env, device.at_time(world_keys, time), state, action, time[None], params)
        length = length + ~over
        over = over | after.terminated | after.truncated
        return (after.state, after.obs, carry, length, over), state

    start = state, obs, device.spread(agent.carry(), 1), jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
    (*_, length, _), states = jax.lax.scan(step, start, jnp.arange(limit, dtype=jnp.int32))
    return jax.tree.map(lambda x: x[:, 0], states), length[0]


def _draw(env: Env, states: Tree, params: Tree, shown: np.ndarray) -> np.ndarray:
    """uint8 [frames, agents, H, W, 3], drawn a few at a time to bound memory."""
    assert env.render is not None
    draw = jax.jit(jax.vmap(jax.vmap(env.render), (0, None)))
    block = 25
    rows = np.concatenate([shown, np.repeat(shown[-1:], -len(shown) % block, 0)])
    agents = np.arange(shown.shape[1])
    at = lambda times: jax.tree.map(lambda x: x[agents, times], states)
    drawn = [np.asarray(draw(at(times), params)) for times in rows.reshape(-1, block, len(agents))]
    return np.concatenate(drawn)[: len(shown)]


def _label(text: str, width: int) -> np.ndarray:
    image = Image.new("RGB", (width, LABEL_HEIGHT), "white")
    ImageDraw.Draw(image).text((5, 3), text, fill=(40, 40, 40))
    return np.asarray(image)


def _write(path: Path, frames: np.ndarray) -> Path:
    if shutil.which("ffmpeg"):
        path = path.with_suffix(".mp4")
        size = f"{frames.shape[2]}x{frames.shape[1]}"
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(FRAMES_PER_SECOND), "-i", "-"]
        command = ["ffmpeg", "-loglevel", "error", "-y", *raw, "-pix_fmt", "yuv420p", str(path)]
        if subprocess.run(command, input=frames.tobytes(), timeout=120, check=False).returncode == 0:
            return path
    path = path.with_suffix(".gif")
    images = [Image.fromarray(frame).quantize(64, Image.Quantize.FASTOCTREE) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=1000 // FRAMES_PER_SECOND, loop=0)
    return path
