"""The verbs that measure, `shoal bench …`: rows as a table, Markdown or JSON. Told on stderr as it goes."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.app import text
from shoal.app.config import Settings
from shoal.errors import ShoalError
from shoal.runs.folder import open_run

HIDDEN = ("net", "steps_per_env", "minibatches", "rounds", "trained", "note", "versions")  # only in JSON


def profile(
    device: str = "cpu",  # cpu or gpu
    rounds: int = 5,  # turns of each row
    markdown: bool = False,  # a Markdown table instead
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Measure training on this machine's CPU or GPU, within five minutes: PPO, convolutions, DQN."""
    from shoal.app import speed

    if device not in speed.PROFILES:
        raise ShoalError(f"there is no profile of {device!r}", "use --device cpu or gpu")
    _show(speed.profile(device, _positive("rounds", rounds), speed.teller()), json, markdown)


def ppo_cartpole(
    agents: int = 16,  # trained together
    envs: int = 4,  # per agent
    steps_per_env: int = 128,  # per update
    minibatches: int = 4,  # per epoch
    rounds: int = 5,  # turns of each contestant
    all: bool = False,  # the four workloads of the committed table instead
    learn: bool = True,  # also train each to its end once, and show what it reaches
    markdown: bool = False,  # a Markdown table instead
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Measure PPO beside others' programs, in turns: training speed and return on CartPole."""
    from shoal.app import speed

    one = speed.Workload(agents, envs, steps_per_env, minibatches)
    workloads = speed.PPO_CARTPOLE if all else (one,)
    _show(speed.ppo_cartpole(workloads, _positive("rounds", rounds), learn, speed.teller()), json, markdown)


def dqn_cartpole(
    rounds: int = 5,  # turns of each contestant
    learn: bool = False,  # also train each to its end once, and show what it reaches
    markdown: bool = False,  # a Markdown table instead
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Measure DQN beside others' programs, and 16 agents beside one per core, in turns."""
    from shoal.app import speed

    _show(speed.dqn_cartpole(_positive("rounds", rounds), learn, speed.teller()), json, markdown)


def scaling(
    rounds: int = 5,  # turns of each row
    markdown: bool = False,  # a Markdown table instead
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Measure time and memory per agent as agents and envs grow, and of convolutional networks."""
    from shoal.app import speed

    _show(speed.scaling(_positive("rounds", rounds), speed.teller()), json, markdown)


def peers() -> None:
    """Install the programs to compare with, each in a venv of its own; about a gigabyte."""
    from shoal.app import contest

    contest.install_peers(print)


def pbt(
    seeds: int = 5,  # meta-seeds
    markdown: bool = False,  # a Markdown table instead
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Measure PBT against random search, at equal env steps."""
    from shoal.app import measure

    _show(measure.pbt(_positive("seeds", seeds)), json, markdown)


def act(
    run: str = "last",  # a name under --root, a path, or `last`
    /,
    root: str = "runs",  # the folder of run folders
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Measure how fast trained agents act: latency and actions per second, for 1 to 1,024 agents."""
    path = open_run(run, root).path
    from shoal.app import measure

    _show(measure.act(path), json)


def overhead(
    rounds: int = 12,  # pairs of one training with and one without
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Measure what rows, progress and checkpoints cost, against training without them."""
    from shoal.app import measure

    _show(measure.overhead(rounds), json)


def presets(
    env: str = "all",  # one env, or all that have a preset
    /,
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Measure again what every preset scores, and how long it takes.

    `wall_s` is compiling and training, without evaluation and report; `env_steps_per_s` is of all agents
    together, and without compiling.
    """
    from shoal.app import measure

    _show(measure.presets(None if env == "all" else env), json)


def modes(
    settings: Settings,
    /,
    cross: tuple[str, ...] = (),  # also with other settings, such as ppo.num_envs=4,64; may be repeated
    rounds: int = 1,  # turns of each mode
    out: str | None = None,  # the folder of the picture modes-ENV.svg; none = this one
    markdown: bool = False,  # a Markdown table instead
    json: bool = False,  # end stdout with one line of JSON
) -> int:
    """Measure how best to run N agents here: one by one, as processes, in one program, over all devices."""
    from shoal.app import modes, speed, verdict

    say = speed.teller()
    rows, checks, notes = [], [], []
    for apart, varied in list(modes.variants(settings, cross)):
        compared = modes.compare(varied, _positive("rounds", rounds), say)
        rows += verdict.rows(compared, apart)
        checks.append(apart | verdict.agreement(compared))
        notes += [note for note in verdict.notes(compared) if note not in notes]
    advice = verdict.recommendation(rows, settings.train.agents)
    picture = Path(out or ".") / f"modes-{re.sub(r'[^A-Za-z0-9]+', '-', settings.train.env)}.svg"
    verdict.draw(rows, picture)
    worst = max(checks, key=lambda check: (not check["holds"], check["largest"]))
    if json:
        facts = dict(env=settings.train.env, algo=settings.train.algo, agents=settings.train.agents)
        told = dict(rows=rows, recommendation=advice, agreement=worst, notes=notes, picture=str(picture))
        print(text.json_line(facts | told))
    else:
        print((text.markdown if markdown else text.table)(verdict.shown(rows)), *notes, advice, sep="\n")
    if not worst["holds"]:
        print(f"error: {verdict.disagreement(worst)}", file=sys.stderr)
    return 0 if worst["holds"] else 1


def _positive(name: str, number: int) -> int:
    if number < 1:
        raise ShoalError(f"--{name} {number} must be at least 1", "5 is the default")
    return number


def _show(rows: Sequence[Mapping[str, Any]], json: bool, markdown: bool = False) -> None:
    if json:
        print(text.json_line({"rows": list(rows)}))
        return
    rows = [{key: value for key, value in row.items() if key not in HIDDEN} for row in rows]
    print((text.markdown if markdown else text.table)(rows))
