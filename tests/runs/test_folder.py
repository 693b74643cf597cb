"""A run has one folder, alone, and is found again."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.runs import folder, manifest


def make(root, env="cartpole", started="2025-01-01T00:00:00+00:00", **facts):
    run = folder.create(root, env, "ppo")
    manifest.write_json(run.manifest, {"started": started, **facts})
    return run


def test_a_run_is_named_after_env_and_algo(tmp_path):
    run = folder.create(tmp_path / "runs", "cartpole", "ppo")
    assert run.path.is_dir()
    assert run.name.startswith("cartpole-ppo-")
    assert len(run.name) == len("cartpole-ppo-k3f9")


@pytest.mark.parametrize(
    ("spec", "stem"),
    [
        ("gymnasium:Ant-v5", "gymnasium-Ant-v5"),
        ("../my.module:make", "my.module-make"),
        ("a b/c", "a-b-c"),
        ("é", "x"),
    ],
)
def test_specs_become_file_names(spec, stem, tmp_path):
    run = folder.create(tmp_path, spec, "ppo")
    assert run.path.parent == tmp_path
    assert run.name[:-5] == f"{stem}-ppo"


def test_runs_started_together_get_their_own_folders(tmp_path, monkeypatch):
    letters = iter("aaaa" + "aaaa" + "bbbb")  # the second run first draws the first one's name
    monkeypatch.setattr(folder.secrets, "choice", lambda _: next(letters))
    names = [folder.create(tmp_path, "cartpole", "ppo").name for _ in range(2)]
    assert names == ["cartpole-ppo-aaaa", "cartpole-ppo-bbbb"]


def test_many_threads_get_many_folders(tmp_path):
    threads = [threading.Thread(target=folder.create, args=(tmp_path, "e", "a")) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.glob("e-a-*"))) == 32
    assert (tmp_path / "last").resolve().parent == tmp_path.resolve()
    assert not list(tmp_path.glob(".last-*"))


def test_out_is_taken_exactly_and_never_overwritten(tmp_path):
    out = tmp_path / "deep" / "here"
    run = folder.create(tmp_path / "runs", "cartpole", "ppo", out)
    assert run.path == out
    assert folder.create(tmp_path / "runs", "cartpole", "ppo", out).path == out  # still empty
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ShoalError, match="not an empty folder"):
        folder.create(tmp_path / "runs", "cartpole", "ppo", out)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ShoalError, match="not an empty folder"):
        folder.create(tmp_path / "runs", "cartpole", "ppo", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_unwritable_place_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ShoalError, match=r"Cannot make a run folder in .*: Not a directory") as error:
        folder.create(tmp_path / "file" / "runs", "cartpole", "ppo")
    assert "--out" in error.value.hint


@pytest.mark.parametrize("links", [True, False], ids=["symlink", "text file"])
def test_last_is_the_newest_run_also_after_a_move(links, tmp_path, monkeypatch):
    if not links:

        def refuse(*_, **__):
            raise OSError("no links here")

        monkeypatch.setattr(Path, "symlink_to", refuse)
    root = tmp_path / "runs"
    make(root)
    newest = make(root)
    assert (root / "last").is_symlink() == links
    assert folder.open_run("last", root).path.resolve() == newest.path.resolve()
    os.rename(root, tmp_path / "moved")
    assert folder.open_run("last", tmp_path / "moved").path.name == newest.name


def test_last_follows_a_run_put_elsewhere(tmp_path):
    out = folder.create(tmp_path / "runs", "cartpole", "ppo", tmp_path / "elsewhere")
    manifest.write_json(out.manifest, {})
    assert folder.open_run("last", tmp_path / "runs").path.resolve() == out.path.resolve()
    assert folder.list_runs(tmp_path / "runs") == []


def test_a_run_is_found_by_name_and_by_path(tmp_path):
    run = make(tmp_path)
    assert folder.open_run(run.name, tmp_path) == run
    assert folder.open_run(run.path, tmp_path / "other") == run
    assert folder.open_run(f"{run.path}/", tmp_path / "other") == run


def test_a_path_is_a_path_and_last_is_never_a_folder_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("foo", "last", "runs/foo"):
        run = folder.create("elsewhere", "cartpole", "ppo", place)
        manifest.write_json(run.manifest, {})
    assert folder.open_run(Path("foo")).path == Path("foo")
    assert folder.open_run("./foo").path == Path("foo")
    assert folder.open_run("foo").path == Path("runs/foo")
    with pytest.raises(ShoalError, match="There is no run 'last' in runs"):
        folder.open_run("last")
    with pytest.raises(ShoalError, match="There is no run at bar"):
        folder.open_run(Path("bar"))


def test_a_missing_run_names_the_nearest(tmp_path):
    with pytest.raises(ShoalError, match="There is no run 'last'") as error:
        folder.open_run("last", tmp_path / "none")
    assert error.value.hint == "There are no runs there yet."
    run = make(tmp_path)
    with pytest.raises(ShoalError, match="There is no run 'cartpole-ppo-zz'") as error:
        folder.open_run("cartpole-ppo-zz", tmp_path)
    assert error.value.hint == f"Did you mean {run.name}?"
    with pytest.raises(ShoalError) as error:
        folder.open_run("qqqq", tmp_path)
    assert error.value.hint == f"The newest run there is {run.name}."


@pytest.mark.parametrize("damage", ["{", "[]", "5", "\xff"])
def test_runs_are_listed_newest_first_and_a_damaged_one_last(damage, tmp_path):
    old, new = make(tmp_path, started="2024-05-01"), make(tmp_path, started="2025-05-01")
    damaged = make(tmp_path)
    damaged.manifest.write_text(damage, "latin-1")
    folder.create(tmp_path, "never", "started")
    assert folder.list_runs(tmp_path) == [new, old, damaged]
    assert folder.status(damaged) == "damaged"


def test_size_counts_every_file(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"x" * 1000)
    (tmp_path / "b").write_bytes(b"x" * 24)
    (tmp_path / "last").symlink_to(tmp_path / "deep")  # not followed: nothing counts twice
    assert folder.size_bytes(tmp_path) == 1024


HOLD = """
    import sys, pathlib
    from shoal.runs import folder
    with folder.lock(folder.RunFolder(pathlib.Path(sys.argv[1]))):
        print("locked", flush=True)
        sys.stdin.read()
"""


def test_a_locked_run_is_live_and_a_killed_process_frees_it(tmp_path):
    run = make(tmp_path)
    assert folder.status(run) == "stopped"
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert folder.status(run) == "live"
        with pytest.raises(ShoalError, match="Another process is training"), folder.lock(run):
            pass
        process.kill()
        process.wait()
    assert folder.status(run) == "stopped"
    with folder.lock(run):
        assert folder.status(run) == "live"
        assert folder.status(run) == "live"  # asking does not free it
    assert folder.status(run) == "stopped"


def test_a_finished_run_says_so(tmp_path):
    assert folder.status(make(tmp_path, finished=True)) == "finished"
    assert folder.status(make(tmp_path, finished=True, result={"alive": 1})) == "finished"
    assert folder.status(make(tmp_path, finished=True, result={"alive": 0})) == "diverged"


def test_the_room_is_light_to_import():
    program = """
        import sys
        from shoal.runs import folder, manifest, metrics, report, statistics
        heavy = {"jax", "orbax", "matplotlib", "scipy"} & set(sys.modules)
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=30)
