"""Records are strict, atomic, and read back as they were written."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.runs import manifest


def test_collect_gives_what_a_result_depends_on_but_not_who_made_it():
    facts = manifest.collect(seed=3)
    assert facts["seed"] == 3
    assert facts["packages"]["jax"]
    assert facts["started"].endswith("+00:00")
    assert str(Path.home()) not in json.dumps({**facts, "command": ""})


def test_git_state_is_commit_and_dirty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert manifest.collect()["git"] is None

    def git(*command):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(["git", *who, *command], check=True, capture_output=True, text=True).stdout

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    assert manifest.collect()["git"] == {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert manifest.collect()["git"]["dirty"]


def test_the_command_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/shoal", "train", "cart pole"])
    assert manifest.collect()["command"] == "shoal train 'cart pole'"
    monkeypatch.setattr(sys, "argv", ["/home/me/x.py", "1"])
    monkeypatch.setattr(sys, "orig_argv", ["/opt/bin/python3", "x.py", "1"])
    assert manifest.collect()["command"] == "python x.py 1"


def test_json_is_strict(tmp_path):
    path = tmp_path / "a.json"
    manifest.write_json(
        path, {"nan": math.nan, "inf": np.float32(-np.inf), "x": np.arange(3), "p": Path("a"), 1: (True,)}
    )
    assert manifest.read_json(path) == {"nan": None, "inf": None, "x": [0, 1, 2], "p": "a", "1": [True]}
    path.write_text('{\n"a": }')
    with pytest.raises(ShoalError, match=r"a.json is not valid JSON: .* line 2"):
        manifest.read_json(path)


def test_what_a_record_lacks_is_named(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(ShoalError, match=r"Cannot read .*a.json: No such file"):
        manifest.read_object(path)
    for text, said in (("[]", r"it holds \[\], not an object"), ('{"x": 1}', "it has no y, z")):
        path.write_text(text)
        with pytest.raises(ShoalError, match=rf"a.json is damaged: {said}"):
            manifest.read_object(path, "x", "y", "z")
    with pytest.raises(ShoalError, match=r"a.json is damaged: it has no y"), manifest.reading(path):
        _ = {"x": 1}["y"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    manifest.write_json(path, 1)

    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(manifest.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        manifest.write_json(path, 2)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "1\n")]


scalar = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
table = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), scalar | st.lists(scalar))


@settings(deadline=None)
@given(top=table, tables=st.dictionaries(st.text("abcé .", min_size=1), table, max_size=3))
def test_toml_reads_back_equal(top, tables, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "config.toml"
    manifest.write_toml(path, top | tables)
    assert manifest.read_toml(path) == top | tables


def test_toml_shows_origins_and_leaves_out_none(tmp_path):
    path = tmp_path / "config.toml"
    given = {"env": "cartpole", "seed": 1, "out": None, "ppo": {"lr": np.float64(3e-4), "hidden": (64, 64)}}
    manifest.write_toml(path, given, {"env": "command line", "seed": "default", "ppo.lr": "preset"})
    assert path.read_text() == (
        'env = "cartpole"  # command line\n'
        "seed = 1          # default\n"
        "\n"
        "[ppo]\n"
        "lr = 0.0003  # preset\n"
        "hidden = [64, 64]\n"
    )
    assert manifest.read_toml(path) == {"env": "cartpole", "seed": 1, "ppo": {"lr": 3e-4, "hidden": [64, 64]}}
    with pytest.raises(TypeError, match="no TOML for object"):
        manifest.write_toml(path, {"x": object()})


def test_a_toml_mistake_names_file_and_line(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("seed = 1\nenv = cartpole\n")
    with pytest.raises(ShoalError, match=r"config.toml: .*line 2"):
        manifest.read_toml(path)
    with pytest.raises(ShoalError, match="no file"):
        manifest.read_toml(tmp_path / "none.toml")
