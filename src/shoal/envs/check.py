"""Does an env keep the contract? `check_env` uses it in every way training will, and says what breaks.

The checks come in two rounds: `FORM` looks at shapes and dtypes without running anything, and stops at the
first failure; `PLAY` plays at random once and judges what was seen. An exception in the env becomes a row
that names its line.
"""

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.envs import case as cases
from shoal.envs import spaces
from shoal.envs.case import HOMES, LANES, Case, numbers
from shoal.types import Array, Env, Key, Params, Step, Tree

WEAK = " weakly typed"


class Row(NamedTuple):
    name: str
    status: str  # "ok", "warn" or "fail"
    message: str


class Report(NamedTuple):
    env: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """No row failed; warnings are allowed."""
        return not _failed(self.rows)

    def __str__(self) -> str:
        return "\n".join(f"{row.status:4}  {row.name:14}  {row.message}" for row in self.rows)


def check_env(env: Env, *, seed: int = 0, steps: int = 1000) -> Report:
    """Check any env against the contract in `shoal.types`; never raises on a broken env.

    `steps` are played by each of at least 16 envs; a few seconds, most of them compiling.
    """
    case = Case(env, jax.random.key(seed), steps)  # the first checks fill it, outside of any trace
    rows = _until_failure((*FORM, check_play), case)
    if not _failed(rows):
        for check in PLAY:
            rows += _run(check, case)
    named = rows[0].status == "ok"
    return Report(env.name if named else type(env).__name__, tuple(rows))


def form(env: Env, params: Params = None) -> tuple[Row, ...]:
    """What can be known without compiling or running: parts, spaces, shapes, dtypes. Takes milliseconds.

    Stops at the first check that fails, whose rows are then the last. `params` instead of the default ones.
    """
    return tuple(_until_failure(FORM, Case(env, jax.random.key(0), 0, params)))


# --- The checks: each yields its problems as (status, message); none means ok, told by its docstring -----

Problems = Iterator[tuple[str, str]]


def check_attributes(case: Case) -> Problems:
    """all parts are there"""
    for name in ("default_params", "reset", "step", "obs_space", "action_space"):
        if not callable(part := getattr(case.env, name, None)):
            yield _fail(f"env.{name}", "a function", part, "see Env in shoal.types")
    for name in ("action_mask", "render"):
        part = getattr(case.env, name, "nothing")
        if part is not None and not callable(part):
            yield _fail(f"env.{name}", "a function or None", part, "set it to None if there is none")
    if not isinstance(given := getattr(case.env, "name", None), str):
        yield _fail("env.name", "a string", repr(given), "give the env a short name")
    limit = getattr(case.env, "time_limit", None)
    if not isinstance(limit, int | np.integer) or not 0 <= limit < 2**31:
        yield _fail("env.time_limit", "an int from 0 (no limit) to 2^31 - 1", repr(limit), "count in steps")


def check_params(case: Case) -> Problems:
    """params are float32 and int32 arrays"""
    for path, leaf in jax.tree.leaves_with_path(case.params):
        got = _spec(leaf)
        if not got.startswith(("float32 [", "int32 [", "bool [")) or got.endswith(WEAK):
            where = f"params{jax.tree_util.keystr(path)}"
            yield _warn(where, "float32 or int32", got, "shoal.envs.params.as_arrays converts them")


def check_spaces(case: Case) -> Problems:
    """spaces are made of Box, Discrete and MultiDiscrete, none of them empty"""
    for name in ("obs_space", "action_space"):
        leaves = jax.tree.leaves(getattr(case, name), is_leaf=spaces.is_space)
        if not leaves:
            yield _fail(name, "at least one Box, Discrete or MultiDiscrete", "none", "return a space")
        for leaf in leaves:
            if not spaces.is_space(leaf):
                yield _fail(
                    name, "Box, Discrete or MultiDiscrete", repr(leaf), "import them from shoal.types"
                )
            elif leaf.dtype.itemsize == 8:
                yield _fail(name, "at most 32 bits", leaf.dtype, "use float32 or int32")
            elif 0 in leaf.shape or getattr(leaf, "n", 1) < 1:
                yield _fail(name, "at least one entry and one choice", leaf, "leave an empty part out")
            elif not np.all(np.less_equal(*spaces.bounds(leaf))):
                yield _fail(name, "low <= high", spaces.describe(leaf), "swap or widen the bounds")


def check_reset(case: Case) -> Problems:
    """reset returns (state, obs), obs as in obs_space"""
    if not isinstance(case.reset_spec, tuple) or len(case.reset_spec) != 2:
        got = _tree_of(case.reset_spec)
        yield _fail("reset(key, params)", "a tuple (state, obs)", got, "return these two")
        return
    fix = "change the observation or obs_space so that they agree"
    yield from _compare("obs of reset", case.obs_space, case.reset_spec[1], fix)


def check_step(case: Case) -> Problems:
    """step returns a Step: obs as in obs_space, float32 reward, bool flags"""
    step = case.step_spec
    if missing := [name for name in Step._fields if not hasattr(step, name)]:
        got = f"{type(step).__name__} without {', '.join(missing)}"
        yield _fail("step(key, state, action, params)", "a Step", got, "return shoal.types.Step(…)")
        return
    fix = "change the observation or obs_space so that they agree"
    yield from _compare("obs of step", case.obs_space, step.obs, fix)
    number, flag = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)
    yield from _compare("reward", number, step.reward, "write jnp.float32(…) or .astype(jnp.float32)")
    for name in ("terminated", "truncated"):
        yield from _compare(name, flag, getattr(step, name), "write jnp.bool_(…) or a comparison")
    if not isinstance(step.info, dict):
        yield _fail("info", "a dict of arrays", type(step.info).__name__, "return {} if there is nothing")


def check_stable_state(case: Case) -> Problems:
    """the state keeps its tree, shapes and dtypes"""
    fix = "a loop on the device needs one type of state: make reset and step agree"
    yield from _compare("state of step against that of reset", case.reset_spec[0], case.step_spec.state, fix)


def check_mask_form(case: Case) -> Problems:
    """action_mask is bool, one entry per choice"""
    if case.env.action_mask is None:
        yield "ok", "the env has none"
    else:
        mask = jax.eval_shape(case.env.action_mask, case.reset_spec[0], case.params)
        fix = "one bool per choice, True = allowed; MultiDiscrete: one after the other"
        yield from _compare("action_mask", spaces.mask_space(case.action_space), mask, fix)


def check_play(case: Case) -> Problems:
    """many envs play at random in one compiled loop"""
    assert case.seen  # all that can fail here is the play itself
    yield from ()


def check_determinism(case: Case) -> Problems:
    """same key, same state, same action: same step"""
    # Two traces: state hidden in Python would be frozen into one compiled program, and look pure.
    first, second = case.started(case.key), jax.jit(lambda key: case.start(key))(case.key)
    for name, a, b in zip(("reset", "step"), first, second):
        if not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(numbers(a), numbers(b))):
            fix = "draw from `key` and keep what changes in `state`; no globals, `random` or `np.random`"
            yield _fail(f"{name} called twice", "equal results", "different ones", fix)


def check_resets_differ(case: Case) -> Problems:
    """resets with different keys differ"""
    if all((leaf == leaf[:1]).all() for leaf in map(np.asarray, numbers(case.homes))):
        fix = "fine if the task has one start; otherwise draw from `key`"
        yield _warn(f"{HOMES} resets with as many keys", "different starts", "the same one", fix)


def check_obs_range(case: Case) -> Problems:
    """observations are within obs_space"""
    if case.seen.inside.all():
        return
    leaves = jax.tree.leaves_with_path(case.obs_space, is_leaf=spaces.is_space)
    lows, highs = jax.tree.leaves(case.seen.low), jax.tree.leaves(case.seen.high)
    for (path, leaf), low, high in zip(leaves, lows, highs):
        least, most = spaces.bounds(leaf)
        bad = ~((low >= least) & (high <= most))  # NaN is bad, too
        if bad.any():
            lane, *entry = np.argwhere(bad)[0]
            seen_low, seen_high, allowed_low, allowed_high = (
                f"{float(x[tuple(entry)]):.6g}" for x in (low[lane], high[lane], least, most)
            )
            where = f"obs{jax.tree_util.keystr(path)}{[int(i) for i in entry]}"
            fix = "widen obs_space, or clip the observation if it must not leave it"
            yield _fail(where, f"{allowed_low} … {allowed_high}", f"{seen_low} … {seen_high}", fix)


def check_finite(case: Case) -> Problems:
    """numbers stay finite, also under extreme actions"""
    if case.seen.finite.all():
        return
    lane, step = np.argwhere(~case.seen.finite)[0]
    what = "random actions"
    if lane >= LANES:
        what = f"the constant action {jax.tree.map(lambda x: x[lane - LANES].tolist(), case.extremes)}"
    fix = "look for a division by 0, the root or log of a negative number, a speed without limit"
    yield _fail(f"step {step} with {what}", "finite state, obs and reward", "NaN or infinity", fix)


def check_ends(case: Case) -> Problems:
    """an episode's end shows the true final observation, not the next reset"""
    ended = case.seen.ended
    ends, home, before = ended.sum(), (ended & case.seen.home).sum(), (ended & case.seen.home_before).sum()
    if not ends and case.env.time_limit:
        yield "ok", f"none in {ended.size} steps of play; the time limit of {case.env.time_limit} will do it"
    elif not ends:
        fix = "set Env.time_limit if episodes cannot end by themselves"
        yield _warn("episode ends", "some", f"none in {ended.size} steps of play", fix)
    # Three ends or more, as one may come home by chance; a task that ends at its start was there before.
    if ends >= 3 and home > 0.9 * ends and before < 0.5 * ends:
        got = f"one like a reset's at {home} of {ends} ends (but at {before} just before)"
        fix = "no auto-reset inside the env: return the state that ended the episode, rollouts reset"
        yield _fail("state and obs at an end", "the last of the episode", got, fix)


def check_past_the_end(case: Case) -> Problems:
    """a step past an end gives finite numbers"""
    if not case.seen.finite_past[:LANES].all():  # what extreme actions break is told by another check
        fix = "its result is thrown away, but NaN spreads through masks: keep the numbers finite"
        yield _fail("a step past an end", "finite state, obs and reward", "NaN or infinity", fix)


def check_mask_allows(case: Case) -> Problems:
    """action_mask always allows something"""
    if case.env.action_mask is None:
        yield "ok", "the env has none"
    elif not case.seen.choice.all():
        step = np.argwhere(~case.seen.choice)[0, 1]
        fix = "allow a no-op, or terminate the episode"
        yield _fail(f"action_mask before step {step}", "at least one True", "all False", fix)


def check_vmap(case: Case) -> Problems:
    """vmap equals a Python loop"""
    keys = case.keys[:4]
    looped = zip(*[numbers(case.started(keys[i])) for i in range(4)])
    mapped = numbers(jax.jit(jax.vmap(case.start))(keys))
    for a, b in zip(map(np.stack, looped), mapped):
        if not np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
            worst = np.abs(a.astype(float) - b.astype(float)).max()
            fix = "each env must depend on its own arguments only"
            yield _fail("4 envs under vmap", "the numbers of a Python loop", f"up to {worst:g} apart", fix)


def check_render(case: Case) -> Problems:
    """render gives a picture, uint8 [H, W, 3]"""
    if case.env.render is None:
        yield "ok", "the env has none"
        return
    state = jax.tree.map(lambda x: x[0], case.homes[0])
    picture = jax.jit(case.env.render)(state, case.params)
    if picture.dtype != jnp.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
        yield _fail(
            "render(state, params)", "uint8 [H, W, 3]", _spec(picture), "convert with .astype(jnp.uint8)"
        )
    elif (picture == picture[:1, :1]).all():
        yield _warn("render(state, params)", "a picture", "one flat colour", "are values in 0 … 255?")


def check_speed(case: Case) -> Problems:
    """steps per second"""
    steps = max(case.steps // 4, 1)

    def body(state: Tree, key: Key) -> tuple[Tree, Array]:
        step = case.env.step(key, state, spaces.sample(key, case.action_space), case.params)
        return step.state, step.reward

    def run(key: Key, state: Tree) -> tuple[Tree, Array]:
        return jax.lax.scan(body, state, jax.random.split(key, steps))

    start = case.keys[:HOMES], case.homes[0]
    program = jax.jit(jax.vmap(run)).lower(*start).compile()
    began = time.perf_counter()
    jax.block_until_ready(program(*start))
    rate = HOMES * steps / (time.perf_counter() - began)
    yield "ok", f"{rate:,.0f} steps/s: {HOMES} envs, random actions, no resets, {jax.devices()[0].platform}"


FORM: tuple[Callable[[Case], Problems], ...] = (
    check_attributes,
    check_params,
    check_spaces,
    check_reset,
    check_step,
    check_stable_state,
    check_mask_form,
)
PLAY: tuple[Callable[[Case], Problems], ...] = (
    check_determinism,
    check_resets_differ,
    check_obs_range,
    check_finite,
    check_ends,
    check_past_the_end,
    check_mask_allows,
    check_vmap,
    check_render,
    check_speed,
)


# --- Messages ---------------------------------------------------------------------------------


def _failed(rows: Iterable[Row]) -> bool:
    return any(row.status == "fail" for row in rows)


def _until_failure(checks: Iterable[Callable[[Case], Problems]], case: Case) -> list[Row]:
    rows: list[Row] = []
    for check in checks:
        rows += _run(check, case)
        if _failed(rows):
            break
    return rows


def _run(check: Callable[[Case], Problems], case: Case) -> list[Row]:
    name = check.__name__.removeprefix("check_").replace("_", " ")
    rows = []
    try:
        for status, message in check(case):
            rows.append(Row(name, status, message))
    except Exception as error:
        rows.append(Row(name, "fail", _describe(error)))
    return rows or [Row(name, "ok", str(check.__doc__))]


def _fail(what: str, expected: object, got: object, fix: str) -> tuple[str, str]:
    return "fail", f"{what}: expected {expected}, got {got}; {fix}"


def _warn(what: str, expected: object, got: object, fix: str) -> tuple[str, str]:
    return "warn", f"{what}: expected {expected}, got {got}; {fix}"


def _compare(what: str, expected: Tree, got: Tree, fix: str) -> Problems:
    """Problems where two trees of arrays (or spaces) differ in structure, shape or dtype."""
    want, have = _leaves(expected), _leaves(got)
    structure: Any = jax.tree.structure(expected, is_leaf=spaces.is_space)
    if structure != jax.tree.structure(got):
        yield _fail(what, f"the tree {_tree_of(expected)}", _tree_of(got), fix)
        return
    for path in want:
        if have[path] == want[path]:
            continue
        if have[path].removesuffix(WEAK) == want[path].removesuffix(WEAK):  # runs, but compiles once more
            fix = "a Python number sets no dtype: write jnp.float32(…) or .astype(…)"
            yield _warn(what + path, want[path], have[path], fix)
        else:
            yield _fail(what + path, want[path], have[path], fix)


def _leaves(tree: Tree) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=spaces.is_space)
    return {jax.tree_util.keystr(path): _spec(leaf) for path, leaf in leaves}


def _tree_of(tree: Tree) -> str:
    kind = type(tree).__name__
    return f"{kind} with {', '.join(f'{path} {spec}' for path, spec in _leaves(tree).items()) or 'nothing'}"


def _spec(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return f"a Python {type(x).__name__}"
    return f"{x.dtype} {list(x.shape)}{WEAK if getattr(x, 'weak_type', False) else ''}"


def _describe(error: Exception) -> str:
    """What was raised and, if it was there, where in the user's own code, in one line."""
    packages = [package.__path__[0] for package in (jax, np)]
    ours = (*packages, __file__, str(cases.__file__), str(spaces.__file__), functools.__file__, "<")
    theirs = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    place = f" at {theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
    hint = ""
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        hint = "; under jit no value is known yet: jnp.where for if, jnp for np and math"
    message = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}{place} – {message}{hint}"
