"""`check_env` passes what is right and names what is wrong; every broken env here has one fault."""

import itertools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from shoal.envs import acrobot, breakout, cartpole, mountaincar, mountaincar_continuous, pendulum
from shoal.envs.check import check_env, form
from shoal.envs.params import as_arrays
from shoal.types import Box, Discrete, Env, MultiDiscrete, Step

pytestmark = pytest.mark.usefixtures("quick_compiles")


class Params(NamedTuple):
    speed: float = 0.1


class State(NamedTuple):
    position: jax.Array
    age: jax.Array


def reset(key, params):
    position = jax.random.uniform(key, (), jnp.float32, -0.1, 0.1)
    return State(position, jnp.int32(0)), jnp.stack([position, jnp.float32(0)])


def step(key, state, action, params):
    """Left or right on a line, for ten steps."""
    state = State(state.position + params.speed * (2 * action - 1), state.age + 1)
    obs = jnp.stack([state.position, state.age / 10])
    return Step(state, obs, -jnp.abs(state.position), state.age == 10, jnp.bool_(False), {})


GOOD = Env(
    "line",
    lambda: as_arrays(Params()),
    reset,
    step,
    lambda params: Box(-2.0, 2.0, (2,)),
    lambda params: Discrete(2),
)


def check(env):
    return check_env(env, steps=50)


def rows(report, status) -> dict[str, str]:
    """Name of a check -> its messages of this status."""
    found: dict[str, str] = {}
    for row in report.rows:
        if row.status == status:
            found[row.name] = found.get(row.name, "") + row.message + "\n"
    return found


def only_failure(env) -> tuple[str, str]:
    report = check(env)
    assert not report.ok
    [failure] = rows(report, "fail").items()
    return failure


@pytest.mark.parametrize(
    "module",
    [cartpole, acrobot, mountaincar, mountaincar_continuous, pendulum, breakout],
    ids=lambda module: module.__name__.split(".")[-1],
)
def test_built_in_envs_pass(module):
    report = check_env(module.make(), steps=500)
    assert {row.status for row in report.rows} == {"ok"}, str(report)
    assert "steps/s" in str(report)


def test_a_good_env_passes():
    report = check(GOOD)
    assert report.env == "line"
    assert report.ok
    assert not rows(report, "warn")


# --- Form: found without a run ---------------------------------------------------------------------


def test_wrong_obs_shape():
    name, message = only_failure(GOOD._replace(obs_space=lambda params: Box(-2.0, 2.0, (3,))))
    assert name == "reset"
    assert "expected float32 [3], got float32 [2]" in message


def test_wrong_dtype():
    def float16(key, state, action, params):
        after = step(key, state, action, params)
        return after._replace(obs=after.obs.astype(jnp.float16), reward=jnp.int32(1))

    name, message = only_failure(GOOD._replace(step=float16))
    assert name == "step"
    assert "obs of step: expected float32 [2], got float16 [2]" in message
    assert "reward: expected float32 [], got int32 []" in message


def test_state_that_changes_its_structure():
    def grows(key, state, action, params):
        after = step(key, State(*state[:2]), action, params)
        return after._replace(state={"position": after.state.position})

    name, message = only_failure(GOOD._replace(step=grows))
    assert name == "stable state"
    assert "State with .position float32 [], .age int32 []" in message
    assert "got dict with ['position'] float32 []" in message


def test_step_of_another_library():
    def six(key, state, action, params):
        return (*step(key, state, action, params), {})

    name, message = only_failure(GOOD._replace(step=six))
    assert name == "step"
    assert "expected a Step, got tuple without state, obs" in message


def test_weak_types_and_python_params_are_warned_about():
    def weak(key, state, action, params):
        return step(key, state, action, params)._replace(reward=1.0)

    report = check(GOOD._replace(step=weak, default_params=Params))
    assert report.ok
    assert "expected float32 [], got float32 [] weakly typed" in rows(report, "warn")["step"]
    assert "as_arrays" in rows(report, "warn")["params"]


def test_an_exception_is_told_with_its_line():
    def branches(key, state, action, params):
        if state.position > 0:
            return step(key, state, 1 - action, params)
        return step(key, state, action, params)

    name, message = only_failure(GOOD._replace(step=branches))
    assert name == "step"
    assert "TracerBoolConversionError" in message
    assert "test_check.py:" in message
    assert "if state.position > 0:" in message
    assert "jnp.where for if" in message


@pytest.mark.parametrize(
    ("env", "name", "message"),
    [
        (None, "attributes", "env.step: expected a function, got None"),
        (GOOD._replace(time_limit=-1), "attributes", "env.time_limit: expected an int"),
        (GOOD._replace(action_space=lambda params: Discrete(0)), "spaces", "got Discrete(n=0)"),
        (GOOD._replace(obs_space=lambda params: Box(0, 1, (0,))), "spaces", "at least one entry"),
        (
            GOOD._replace(obs_space=lambda params: Box(0, float("nan"), (2,))),
            "spaces",
            "expected low <= high",
        ),
        (GOOD._replace(default_params=lambda: 1 / 0), "params", "ZeroDivisionError"),
        (GOOD._replace(obs_space=lambda params: "Box"), "spaces", "got 'Box'"),
        (GOOD._replace(obs_space=lambda params: ()), "spaces", "got none"),
        (GOOD._replace(obs_space=lambda params: Box(1, 0, (2,))), "spaces", "expected low <= high"),
        (GOOD._replace(reset=lambda key, params: jnp.zeros(2)), "reset", "expected a tuple (state, obs)"),
        (GOOD._replace(reset=lambda key: 0), "reset", "TypeError"),
        (
            GOOD._replace(action_mask=lambda s, p: jnp.ones(3, bool)),
            "mask form",
            "expected bool [2], got bool [3]",
        ),
    ],
)
def test_nothing_is_raised(env, name, message):
    failures = rows(check(env), "fail")
    assert message in failures[name]


def test_an_env_that_cannot_be_vmapped_is_told_once():
    def calls_python(key, state, action, params):
        after = step(key, state, action, params)
        return after._replace(reward=jax.pure_callback(lambda x: x, after.reward, after.reward))

    name, message = only_failure(GOOD._replace(step=calls_python))
    assert name == "play"
    assert message.startswith("NotImplementedError – ")


def test_form_runs_nothing_and_uses_the_params_it_is_given():
    def branches_on_the_params(params):
        return Box(-2.0, 2.0, (2 if params.speed == 0.5 else 3,))

    env = GOOD._replace(obs_space=branches_on_the_params)
    assert not any(row.status == "fail" for row in form(env, Params(0.5)))
    assert form(env)[-1].status == "fail"
    began = time.perf_counter()
    form(GOOD)
    assert time.perf_counter() - began < 1


# --- Play: found by running ------------------------------------------------------------------------


def test_auto_reset():
    def resets(key, state, action, params):
        after = step(key, state, action, params)
        fresh, obs = reset(key, params)
        pick = lambda a, b: jnp.where(after.terminated, a, b)
        return after._replace(state=jax.tree.map(pick, fresh, after.state), obs=pick(obs, after.obs))

    name, message = only_failure(GOOD._replace(step=resets))
    assert name == "ends"
    assert "no auto-reset inside the env" in message


def test_state_hidden_in_python():
    calls = itertools.count()

    def counts(key, state, action, params):
        return step(key, state, action, params)._replace(reward=jnp.float32(next(calls)))

    failures = rows(check(GOOD._replace(step=counts)), "fail")
    assert "step called twice: expected equal results" in failures["determinism"]


def test_nan_under_extreme_actions_only():
    def divides(key, state, action, params):
        after = step(key, state, 0, params)
        return after._replace(reward=after.reward / (1 - action**2))

    env = GOOD._replace(step=divides, action_space=lambda params: Box(-1.0, 1.0))
    name, message = only_failure(env)
    assert name == "finite"
    assert "with the constant action -1.0: expected finite" in message


def test_nan_past_an_end():
    def root(key, state, action, params):
        after = step(key, state, action, params)
        return after._replace(reward=jnp.sqrt(10.0 - after.state.age))

    name, _ = only_failure(GOOD._replace(step=root))
    assert name == "past the end"


def test_obs_outside_its_space():
    name, message = only_failure(GOOD._replace(obs_space=lambda params: Box((-2, 0), (2, 0.5), (2,))))
    assert name == "obs range"
    assert "obs[1]: expected 0 … 0.5, got 0 … 1;" in message


def test_mask_that_allows_nothing():
    mask = lambda state, params: jnp.array([True, True]) & (state.age < 7)
    name, message = only_failure(GOOD._replace(action_mask=mask))
    assert name == "mask allows"
    assert "action_mask before step 7: expected at least one True" in message


def test_masks_of_several_choices_are_obeyed():
    """The env breaks when a forbidden action is taken, so passing means none was."""

    def forbids(key, state, action, params):
        after = step(key, state, action[0], params)
        return after._replace(reward=jnp.where(action[1] == 1, jnp.nan, after.reward))

    env = GOOD._replace(
        step=forbids,
        action_space=lambda params: MultiDiscrete((2, 3)),
        action_mask=lambda state, params: jnp.array([True, True, True, False, True]),
    )
    report = check(env)
    assert report.ok, str(report)


def test_one_start_for_all_is_only_warned_about():
    env = GOOD._replace(reset=lambda key, params: reset(jax.random.key(0), params))
    report = check(env)
    assert report.ok
    assert "expected different starts, got the same one" in rows(report, "warn")["resets differ"]


def test_render_that_is_no_picture():
    name, message = only_failure(GOOD._replace(render=lambda state, params: jnp.zeros((4, 4))))
    assert name == "render"
    assert "expected uint8 [H, W, 3], got float32 [4, 4]" in message
