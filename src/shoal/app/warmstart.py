"""What a run does before its first update: take parameters over, then act for a while to fill statistics."""

from typing import Any

import jax
import numpy as np

from shoal.algos.update import AgentState
from shoal.app import parameters
from shoal.app.assembly import Assembled, Compiler
from shoal.errors import ShoalError
from shoal.training import loop, program
from shoal.training.signals import Stop


class Preparation:
    """How the agents of a run are prepared before they train."""

    def __init__(self, made: Assembled, root: str = "runs"):
        """ShoalError where what is asked for cannot be, before anything is compiled."""
        self.made, train = made, made.settings.train
        self.rollouts = -(-train.warmup_steps // made.plan.steps_per_update)
        kept = [name for name in ("normalize_obs", "normalize_reward") if getattr(made.sizes, name, False)]
        if self.rollouts and not kept:
            raise ShoalError(
                f"--warmup-steps {train.warmup_steps} has nothing to fill: {train.algo} keeps no statistics",
                "ppo and rppo do with normalize_obs or normalize_reward: --ppo.normalize_obs",
            )
        self.inherited = None
        if train.init_from:
            fresh = made.agent, made.knobs, made.learner
            self.inherited = parameters.inheritance(*fresh, train.algo, train.init_from, root)
        self._warm_up: Any = None

    def compile(self, compiler: Compiler) -> None:
        """What `__call__` runs."""
        made = self.made
        if self.rollouts:
            self._warm_up = compiler("warm-up", lambda: program.compile_warm_up(made.recipe, made.layout))

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each thing that will happen, for the plan."""
        steps = self.rollouts * self.made.plan.steps_per_update
        filled = f"before training, {steps:,} env steps per agent fill the statistics; they do not count"
        return (*self._inherited_notes(), *(filled,) * bool(steps))

    def _inherited_notes(self) -> tuple[str, ...]:
        if not self.inherited:
            return ()
        source, chosen = self.inherited.source, self.inherited.chosen
        who = f"agent {source.agents[chosen[0]]}" if len(chosen) == 1 else f"{len(chosen)} agents"
        count = sum(path.startswith(parameters.PARAMS) for path in self.inherited.taken)
        return (f"{count} parameter arrays are taken over from {who} of {source.name}", *self.inherited.notes)

    def __call__(
        self, state: AgentState, stop: Stop, listen: loop.Listener
    ) -> tuple[AgentState, dict[str, Any]]:
        """The state that training begins with, and what the manifest says of how it came about."""
        facts: dict[str, Any] = {}
        if self.inherited:
            agents = np.asarray(state.identity.agent)
            state = state._replace(learner=self.inherited(state.learner, agents))
            source = self.inherited.source
            facts["init_from"] = dict(
                source=source.name,
                agents=[source.agents[place] for place in self.inherited.chosen],
                parameters=sorted(self.inherited.taken),
            )
        if self.rollouts:
            state = jax.block_until_ready(self._warm_up(state, np.int32(self.rollouts)))
            facts["warmup_env_steps"] = self.rollouts * self.made.plan.steps_per_update  # per agent
        return state, facts
