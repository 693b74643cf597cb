"""What is refused before anything is compiled, and what a run says of itself."""

import logging
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from shoal.app import assembly, catalogue
from shoal.app.assembly import assemble, facts, refuse_too_large, use_compile_cache
from shoal.app.config import resolve
from shoal.errors import ShoalError
from shoal.runs import manifest
from shoal.types import Box, Discrete, Env, Step

PPO = {"num_envs": 2, "num_steps": 8, "hidden": (4,)}


class Params(NamedTuple):
    size: float = 2.0  # a Python number: a warning of `shoal env check`, no more


def step(key, state, action, params):
    return Step(state + 1, jnp.zeros(2), jnp.float32(0), state > 3, jnp.bool_(False), {})


GOOD = Env(
    "still",
    Params,
    lambda key, params: (jnp.int32(0), jnp.zeros(2)),
    step,
    lambda params: Box(0.0, 1.0, (int(params.size),)),
    lambda params: Discrete(2),
)


@pytest.fixture
def made(monkeypatch):
    """Assemble an env with settings of its own."""

    def make(env=GOOD, own=None, **flat):
        monkeypatch.setitem(catalogue.LIVE, "my_envs:make", lambda: env)
        flat = {"env": "my_envs:make", "agents": 3, "devices": 1} | flat
        return assemble(resolve(flat, {"ppo": PPO, "env": own or {}}))

    return make


def plain(key, state, action, params):
    return (*step(key, state, action, params),)


def broken(key, state, action, params):
    return step(key, state, action, params)._replace(obs=params.speed)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (GOOD._replace(step=plain), "expected a Step, got tuple"),
        (GOOD._replace(step=broken), "test_assembly.py:"),
        (GOOD._replace(obs_space=lambda params: Box(0, 1, (3,))), "expected float32 [3], got float32 [2]"),
        (GOOD._replace(action_space=lambda params: Discrete(0)), "got Discrete(n=0)"),
        (GOOD._replace(time_limit=-3), "got -3"),
        (GOOD._replace(default_params=lambda: 1 / 0), "test_assembly.py:"),
        (
            GOOD._replace(action_mask=lambda state, params: jnp.ones(3, bool)),
            "expected bool [2], got bool [3]",
        ),
    ],
)
def test_an_env_that_breaks_its_contract_is_refused(made, env, said):
    with pytest.raises(ShoalError) as error:
        made(env)
    assert said in error.value.message
    assert "shoal env check my_envs:make" in error.value.hint


def test_the_form_is_that_of_the_params_asked_for(made):
    assert made().env_params == Params()
    with pytest.raises(ShoalError, match=r"expected float32 \[3\], got float32 \[2\]"):
        made(own={"size": 3})


def test_checking_before_compiling_is_quick(made):
    made()
    began = time.perf_counter()
    made()
    assert time.perf_counter() - began < 2


def test_more_agents_than_memory_holds_are_refused_with_a_number_that_fits(made, monkeypatch):
    few = made()
    monkeypatch.setattr(assembly, "memory", lambda devices: 2_000_000)
    refuse_too_large(few, 2_000_000)
    with pytest.raises(ShoalError, match=r"3 agents need 3 MB of memory, and 2 MB are available") as error:
        refuse_too_large(few, 3_000_000)
    assert "--agents 2" in error.value.hint
    with pytest.raises(ShoalError, match=r"7\.84 PB") as error:
        refuse_too_large(few, 7_840_000_000_000_000)
    assert "not even one" in error.value.hint
    with pytest.raises(ShoalError, match="agents fit"):
        made(agents=2**31 - 1)  # before anything of that size is made
    monkeypatch.setattr(assembly, "memory", lambda devices: 0)
    refuse_too_large(few, 10**18)  # nobody knows, so let it try


def test_the_facts_are_collected_once(made, monkeypatch):
    calls, collect = [], manifest.collect
    monkeypatch.setattr(manifest, "collect", lambda **extra: calls.append(1) or collect(**extra))
    told = facts(made())
    assert len(calls) == 1
    assert {"git", "packages", "fingerprint", "agents"} <= set(told)


def test_a_cache_that_cannot_be_written_is_left_off_with_one_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "shoal").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    assembly._cache_folder.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "shoal"):
            use_compile_cache()
            use_compile_cache()
        assert jax.config.jax_compilation_cache_dir is None
        [told] = caplog.messages
        assert told.startswith("compiled programs are not kept")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        assembly._cache_folder.cache_clear()


def test_the_size_of_a_replay_is_said_and_counted_before_anything_is_compiled():
    """44 bytes a step of CartPole: two observations, action, reward, both ends, the mask of two actions."""
    sizes = {"num_envs": 4, "buffer_size": 2000, "hidden": (4,)}
    made = assemble(resolve({"algo": "dqn", "agents": 3, "devices": 2}, {"dqn": sizes}))
    assert "replay: 2,000 steps per agent, 352 kB for all" in assembly.planned(made, 0).notes  # of four lanes
    assert 352_000 < assembly._least_bytes(made) < 370_000
    with pytest.raises(ShoalError, match=r"agents need 4\.4 TB of memory"):
        assemble(resolve({"algo": "dqn", "agents": 1000}, {"dqn": sizes | {"buffer_size": 10**8}}))
