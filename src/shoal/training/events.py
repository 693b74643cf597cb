"""What the loop tells whoever listens; the listener draws it, and may not slow it down."""

from typing import NamedTuple

import numpy as np


class Planned(NamedTuple):
    """Before anything is compiled or run."""

    env: str
    algo: str
    agents: int
    lanes: int  # agents + padding, so that devices divide them
    envs: int  # per agent
    devices: int
    device_kind: str  # cpu, gpu, tpu
    steps_asked: int  # env steps per agent
    steps: int  # rounded up to whole updates
    updates: int
    bytes_predicted: int  # of the whole program on all devices; 0 = unknown
    notes: tuple[str, ...]  # one line per fact that must not go unsaid


class Compiling(NamedTuple):
    program: str


class Compiled(NamedTuple):
    program: str
    seconds: float


class Progress(NamedTuple):
    """After each chunk of updates."""

    updates: int  # done, per agent
    total_updates: int
    env_steps: int  # done, per agent
    env_steps_per_s: float  # all agents together, over the last chunk
    wall_s: float  # training so far
    eta_s: float
    returns: np.ndarray  # [P] mean return of episodes finished lately; NaN where there were none
    active: np.ndarray  # [P] bool; False once frozen


class Evaluated(NamedTuple):
    updates: int
    env_steps: int
    returns: np.ndarray  # [P] mean return of the sampled policy


class Saved(NamedTuple):
    updates: int


class Diverged(NamedTuple):
    """An agent whose numbers ceased to be finite; it is frozen as it was before that update."""

    agent: int
    updates: int


class Selected(NamedTuple):
    """Agents were compared, and some replaced."""

    updates: int
    replaced: int
    agents: int
    by: str  # copies of better ones, or new samples


class Stopping(NamedTuple):
    reason: str  # what was asked: a signal, a time budget, a return


class Note(NamedTuple):
    """Something worth a line."""

    text: str


Event = Note | Planned | Compiling | Compiled | Progress | Evaluated | Saved | Diverged | Selected | Stopping
