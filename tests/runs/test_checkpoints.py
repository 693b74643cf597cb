"""A checkpoint is complete or absent, and what comes back is what was saved, bit for bit."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.errors import ShoalError
from shoal.runs import checkpoints


class Empty(NamedTuple):
    pass


class State(NamedTuple):
    params: dict[str, Any]
    key: jax.Array
    alive: jax.Array
    updates: jax.Array
    carry: Any
    mask: Any


def make(seed=0, agents=8):
    key = jax.random.key(seed)
    return State(
        params={
            "w": jax.random.normal(key, (agents, 5, 3)),
            "half": jax.random.normal(key, (agents, 7), jnp.bfloat16),
            "none": jnp.zeros((agents, 0)),
            "a/b": (jnp.full((agents,), jnp.nan), jnp.full((agents,), jnp.inf)),
        },
        key=jax.random.split(key, agents),
        alive=jnp.arange(agents) % 2 == 0,
        updates=jnp.arange(agents, dtype=jnp.uint32),
        carry=Empty(),
        mask=None,
    )


def on(devices, tree):
    """`tree` with its leading axis sharded over that many devices."""
    mesh = jax.make_mesh((devices,), ("agent",), devices=jax.devices()[:devices])
    return jax.device_put(tree, jax.NamedSharding(mesh, jax.P("agent")))


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def bits(tree):
    leaves = jax.tree.leaves(tree)
    keys = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [np.asarray(jax.random.key_data(x) if k else x).tobytes() for x, k in zip(leaves, keys)]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]
    assert bits(a) == bits(b)


def files(place):
    return sorted(path for path in place.rglob("*") if path.is_file())


def test_state_and_meta_come_back_bit_for_bit(tmp_path):
    state = make()
    given = {"wall_s": 0.1, "note": "é", "best": -np.inf, "steps": np.int64(2**60)}
    checkpoints.save(tmp_path, 3, state, given)
    restored, meta = checkpoints.restore(tmp_path, like(state))
    assert_same(restored, state)
    assert meta == given
    np.testing.assert_array_equal(jax.random.bits(restored.key[3]), jax.random.bits(state.key[3]))


def test_a_state_without_arrays_comes_back(tmp_path):
    checkpoints.save(tmp_path, 0, Empty(), {})
    assert checkpoints.restore(tmp_path, Empty()) == (Empty(), {})


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_state_saved_on_4_devices_restores_on(devices, tmp_path):
    state = make()
    checkpoints.save(tmp_path, 1, on(4, state), {})
    there = on(devices, state)
    restored, _ = checkpoints.restore(tmp_path, like(there))
    assert_same(restored, state)
    for got, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(there)):
        assert got.sharding == expected.sharding


def test_buffers_may_be_donated_right_after_save(tmp_path):
    state = {"w": jnp.arange(500_000.0), "key": jax.random.split(jax.random.key(0), 8)}
    expected = jax.tree.map(jnp.copy, state)
    spoil = jax.jit(lambda s: {"w": s["w"] * 0 - 1, "key": s["key"][::-1]}, donate_argnums=0)
    with checkpoints.Saver(tmp_path) as saver:
        saver.save(1, state, {})
        spoiled = jax.block_until_ready(spoil(state))
    assert state["w"].is_deleted()
    restored, _ = checkpoints.restore(tmp_path, like(expected))
    assert_same(restored, expected)
    jax.block_until_ready(spoil(restored))  # a restored state can be donated as well
    assert float(spoiled["w"][0]) == -1


def test_newest_checkpoints_and_protected_ones_are_kept(tmp_path):
    state = {"w": jnp.zeros(2)}
    with checkpoints.Saver(tmp_path, last=2) as saver:
        for step in (1, 2, 9, 10, 11):
            saver.save(step, state, {}, protect={2})
    assert checkpoints.steps(tmp_path) == [2, 10, 11]


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path):
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, step, {"w": jnp.zeros(2)}, {})
    files(tmp_path / "3" / "arrays")[0].unlink()
    checkpoints.keep(tmp_path, last=1)
    assert checkpoints.steps(tmp_path) == [2, 3]


def test_saving_a_step_again_replaces_it(tmp_path):
    for value in (1.0, 2.0):
        checkpoints.save(tmp_path, 5, {"w": jnp.full(2, value)}, {})
    restored, _ = checkpoints.restore(tmp_path, {"w": jnp.zeros(2)})
    assert restored["w"].tolist() == [2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


def fill(patch):
    """Make the disk a full one."""
    patch.setattr(checkpoints.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))


def test_a_full_disk_costs_checkpoints_and_one_warning_but_no_older_one(tmp_path, monkeypatch, caplog):
    state = {"w": jnp.zeros(2)}
    saver = checkpoints.Saver(tmp_path / "run" / "checkpoints", last=1)
    saver.save(1, state, {})
    saver.wait()
    with monkeypatch.context() as patch:
        fill(patch)
        for step in (2, 3):
            saver.save(step, state, {})
        with pytest.raises(ShoalError, match=r"Cannot write a checkpoint to .*: No space left") as error:
            saver.wait()
    assert f"shoal resume {tmp_path / 'run'}" in error.value.hint
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    saver.wait()  # said once
    saver.save(4, state, {})
    saver.wait()
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [4]


def test_a_quota_is_as_quiet_as_a_full_disk(tmp_path):
    """Orbax finds out halfway, in several threads that would each print a traceback."""
    program = """
        import pathlib, resource, signal, sys
        import jax
        from shoal.errors import ShoalError
        from shoal.runs import checkpoints
        state = {i: jax.random.normal(jax.random.key(i), (500_000,)) for i in range(8)}
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        saver = checkpoints.Saver(pathlib.Path(sys.argv[1]))
        saver.save(1, state, {})
        try:
            saver.wait()
        except ShoalError:
            sys.exit(3)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith("Cannot write checkpoint 1, training goes on: ")
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_waiting_for_a_save_can_be_interrupted_and_taken_up_again(tmp_path):
    class Pending:
        def __init__(self, real):
            self.real, self.asked = real, 0

        def result(self):
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
            return self.real.result()

    saver = checkpoints.Saver(tmp_path)
    saver.save(1, {"w": jnp.zeros(2)}, {})
    saver._pending = pending = Pending(saver._pending)
    with pytest.raises(KeyboardInterrupt):
        saver.wait()
    saver.wait()
    assert pending.asked == 2
    assert checkpoints.steps(tmp_path) == [1]


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_meta_of_other_names_is_refused(names, tmp_path):
    checkpoints.save(tmp_path, 1, {}, {"a": 1, "b": 2})
    assert checkpoints.restore(tmp_path, {}, meta=("b", "a"))[1] == {"a": 1, "b": 2}
    with pytest.raises(ShoalError, match=r"its meta differs in [bc]\n"):
        checkpoints.restore(tmp_path, {}, meta=names)


class Killed(BaseException):
    pass


CALLS = ("os.fsync", "os.replace", "os.rename", "os.mkdir", "os.unlink", "os.rmdir")


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step again"])
def test_a_save_killed_at_any_file_operation_leaves_a_usable_checkpoint(again, tmp_path, monkeypatch):
    """Every call that touches the disk is made to fail in turn, until a save gets through."""
    checkpoints.save(tmp_path / "before", 1, {"w": jnp.full(2, 1.0)}, {})
    survived = 0
    for fatal in range(400):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(fatal))
        count = iter(range(1000))

        def guarded(real, count=count, fatal=fatal):
            def call(*args, **kwargs):
                if next(count) >= fatal:
                    raise Killed
                return real(*args, **kwargs)

            return call

        killed = False
        with monkeypatch.context() as patch:
            for name in CALLS:
                module, function = name.split(".")
                patch.setattr(f"{module}.{function}", guarded(getattr(os, function)))
            try:
                checkpoints.save(folder, 1 if again else 2, {"w": jnp.full(2, 2.0)}, {})
            except Killed:
                killed = True
        restored, _ = checkpoints.restore(folder, {"w": jnp.zeros(2)})
        assert restored["w"].tolist() in ([1, 1], [2, 2])
        checkpoints.save(folder, 3, {"w": jnp.zeros(2)}, {})  # and the next save finds its way
        assert not list(folder.glob("tmp-*"))
        if not killed:
            break
        survived += 1
        shutil.rmtree(folder)
    assert 10 < survived < 400


def test_torn_saves_are_ignored_and_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, "shoal.runs.checkpoints")
    checkpoints.save(tmp_path, 1, {"w": jnp.ones(2)}, {})
    shutil.copytree(tmp_path / "1", tmp_path / "tmp-2")
    assert checkpoints.steps(tmp_path) == [1]
    checkpoints.restore(tmp_path, {"w": jnp.zeros(2)})
    assert "tmp-2: it was never completed" in caplog.text


def spoil(path, how):
    data = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


@pytest.mark.parametrize("how", ["delete", "truncate", "flip"])
def test_any_damaged_file_of_the_newest_falls_back_to_the_one_before(how, tmp_path, caplog):
    state = {"w": jnp.arange(4096.0), "b": jnp.ones(3)}
    checkpoints.save(tmp_path / "good", 1, state, {"step": 1})
    checkpoints.save(tmp_path / "good", 2, jax.tree.map(jnp.zeros_like, state), {"step": 2})
    for number, file in enumerate(files(tmp_path / "good" / "2")):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        spoil(folder / file.relative_to(tmp_path / "good"), how)
        caplog.clear()
        restored, meta = checkpoints.restore(folder, like(state))
        assert meta == {"step": 1}, file
        assert_same(restored, state)
        assert "is damaged" in caplog.text
        with pytest.raises(ShoalError, match=r"Checkpoint 2 .* is damaged"):
            checkpoints.restore(folder, like(state), step=2)


def test_no_usable_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ShoalError, match="no usable checkpoint"):
        checkpoints.restore(tmp_path / "none", {})
    with pytest.raises(ShoalError, match="no checkpoint 7"):
        checkpoints.restore(tmp_path, {}, step=7)


def other(**changes):
    state = make()
    return state._replace(params={**state.params, **changes})


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (
            other(w=jnp.zeros((8, 5, 4))),
            r"params\['w'\] expected float32 \[8, 5, 4\], got float32 \[8, 5, 3\]",
        ),
        (other(w=jnp.zeros((8, 5, 3), int)), r"params\['w'\] expected int32 \[8, 5, 3\], got float32"),
        (other(new=jnp.zeros(8)), r"params\['new'\] expected float32 \[8\], got nothing"),
        (make()._replace(mask=jnp.zeros(8)), r"mask expected float32 \[8\], got nothing"),
        (make()._replace(updates=None), r"updates expected nothing, got uint32 \[8\]"),
        (
            make()._replace(key=jnp.zeros((8, 2), jnp.uint32)),
            r"key expected uint32 \[8, 2\], got key<fry> \[8\]",
        ),
        (make(agents=4), r"expected float32 \[4\], got float32 \[8\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_path(expected, message, tmp_path):
    checkpoints.save(tmp_path, 1, make(), {})
    with pytest.raises(ShoalError, match=message):
        checkpoints.restore(tmp_path, like(expected))


def test_orbax_leaves_no_root_log_handler(tmp_path):
    program = """
        import logging, sys, pathlib
        import jax.numpy as jnp
        from shoal.runs import checkpoints
        assert "orbax" not in sys.modules
        folder = pathlib.Path(sys.argv[1])
        checkpoints.save(folder, 1, {"w": jnp.ones(2)}, {})
        checkpoints.restore(folder, {"w": jnp.ones(2)})
        assert "orbax.checkpoint" in sys.modules
        assert logging.getLogger().handlers == [], logging.getLogger().handlers
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_process_killed_while_saving_leaves_a_usable_checkpoint(tmp_path):
    program = """
        import sys, pathlib
        import jax.numpy as jnp
        from shoal.runs import checkpoints
        with checkpoints.Saver(pathlib.Path(sys.argv[1])) as saver:
            for step in range(1, 1000):
                saver.save(step, {"w": jnp.full(200_000, step), "step": jnp.asarray(step)}, {"step": step})
                print(step, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 4:
            pass
        time.sleep(random.Random(0).random() * 0.05)
        process.send_signal(signal.SIGKILL)
    target = {"w": jnp.zeros(200_000, int), "step": jnp.asarray(0)}
    restored, meta = checkpoints.restore(tmp_path, target)
    assert meta["step"] >= 3
    assert set(np.unique(restored["w"])) == {meta["step"]} == {int(restored["step"])}
