"""What can be done with a run once it exists: evaluate it again, watch an agent play, export it."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.algos.update import AgentState
from shoal.app import catalogue, policies, text, video
from shoal.app.assembly import Assembled, Compiler, assemble, use_compile_cache
from shoal.app.config import reopen, set_params
from shoal.app.selecting import varied
from shoal.app.session import restored, scores_of, write_policy
from shoal.errors import ShoalError
from shoal.mesh.devices import open_devices
from shoal.population.lanes import resize
from shoal.rollout.device import spread
from shoal.runs import checkpoints, folder
from shoal.runs.folder import RunFolder
from shoal.runs.manifest import reading
from shoal.training import loop


def evaluate(
    path: str | Path,
    episodes: int | None = None,
    seed: int = 0,
    root: str | Path = "runs",
    listen: loop.Listener = lambda event: None,
) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run again; nothing in the folder changes.

    Seed 0 plays the episodes that training ends with and that the best agent is chosen by; another seed
    plays others, for a score that is free of that choice.
    """
    run = folder.open_run(path, root)
    begun = [part for part in folder.parts(run) or [run] if checkpoints.steps(part.checkpoints)]
    if not begun:
        raise ShoalError(f"{run.path} has no checkpoint yet", f"shoal resume {run.path}")
    each = [_evaluated(part, episodes, listen, seed) for part in begun]
    made = each[0][0]
    columns = {name: np.concatenate([columns[name] for *_, columns in each]) for name in each[0][-1]}
    return dict(
        run=run.name,
        env=made.settings.train.env,
        algo=made.settings.train.algo,
        agents=len(columns["agent"]),
        episodes=int(columns["episodes"][0]),
        env_steps_per_agent=int(columns["env_steps"].max()),
        unfinished=int(columns["unfinished"].sum()),
        **scores_of(columns),
    )


def _evaluated(
    run: RunFolder, episodes: int | None, listen: loop.Listener, seed: int = 0
) -> tuple[Assembled, AgentState, dict[str, Any]]:
    """The newest state of a run of one program, and the columns of an evaluation of it."""
    changed = {} if episodes is None else {"eval_episodes": episodes}
    made = assemble(reopen(run.config, changed))
    state, tally, _ = restored(made, run)
    scores = jax.device_get(Compiler(listen).evaluation(made, seed)(state))
    columns = loop.evaluation_columns(made.plan, tally, state, scores) | varied(made)(state)
    return made, state, columns


def play(
    path: str | Path, agent: str | int = "best", root: str | Path = "runs", out: str | Path | None = None
) -> Path:
    """Film one episode of an agent (best, median, worst or an id); returns the file written."""
    use_compile_cache()
    open_devices()
    run_policy = policies.load(path, agent, root)
    contract = run_policy.contract
    env = catalogue.load_env(contract["env"])._replace(time_limit=contract["time_limit"])
    source = policies.folder_of(path, root, agent)
    if env.render is None:
        raise ShoalError(f"{env.name} cannot draw itself", "give its Env a render(state, params) function")
    with reading(source / policies.CONTRACT):
        env_params = set_params(env.default_params(), contract["env_params"])
    env_params = jax.tree.map(jnp.asarray, env_params)
    (number,), (score,) = run_policy.agents, run_policy.returns
    target = Path(out) if out else source.parent / f"play-{number}"
    label = f"agent {number}, return {text.score(score)}"
    return video.film(target, run_policy.agent, env, run_policy.params, spread(env_params, 1), [label])


def export(path: str | Path, out: str | Path, agents: str | int = "all", root: str | Path = "runs") -> Path:
    """Write a run's policies (all of them, or best, median, worst, an id) to a new folder `out`.

    A run that was stopped before its end is evaluated first. Of a sweep over shapes it is the program with
    the best agent that is exported; the others are runs of their own.
    """
    out = Path(out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ShoalError(f"{out} exists and is not empty", "choose another folder: nothing is overwritten")
    with tempfile.TemporaryDirectory() as place:
        try:
            source = policies.folder_of(path, root)
        except ShoalError:
            run = folder.open_run(path, root)
            if not checkpoints.steps(run.checkpoints):
                raise
            source = Path(place)
            made, state, columns = _evaluated(run, None, lambda event: None)
            write_policy(made, source, resize(state, made.plan.agents), columns)
        policies.load(source, agents)  # refuses what could not be loaded from there either
        policies.write_subset(source, out, agents)
    return out
