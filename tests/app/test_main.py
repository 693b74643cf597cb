import json
import subprocess
import sys

import pytest

from shoal.app import main as cli
from shoal.app.main import VERBS, main


def shoal(*words, cwd=None, deadline=120):
    command = [sys.executable, "-m", "shoal.app.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline, cwd=cwd)


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["train", "--help"], ["help", "resume"], ["runs"]], ids=" ".join
)
def test_help_and_listings_do_not_import_jax(words, tmp_path):
    code = (
        f"import sys; from shoal.app.main import main; c = main({words}); sys.exit(c or 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train cartpole --agnets 3", "--agents"),
        ("train cartpole --ppo.lrr 3", "ppo.lr"),
        ("train --ppo.lr fast", "not a number"),
        ("train cartpol", "cartpole"),
        ("train cartpole acrobot", "acrobot"),
        ("train --config nowhere.toml", "nowhere.toml"),
        ("trian cartpole", "did you mean train?"),
        ("resume --stesp 3", "--steps"),
        ("show nothing", "nothing"),
        ("env", "shoal env check"),
        ("env check nothing", "shoal envs"),
        ("compare a", "needs B"),
        ("runs --where x~3", "return>400"),
        ("help nonsense", "shoal help"),
    ],
)
def test_a_mistake_exits_with_2_and_names_what_was_meant(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert "Traceback" not in err


def test_trace_shows_the_whole_of_a_mistake(capsys):
    assert main(["show", "nothing", "--trace"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_value_exits_with_2(capsys):
    assert main(["train", "--agents"]) == 2
    assert "--agents" in capsys.readouterr().err


def test_an_unforeseen_error_is_one_block_and_a_file(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("shoal.app.past.runs", lambda: 1 / 0)
    assert main(["runs"]) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[0].startswith("error: ZeroDivisionError: division by zero")
    (written,) = tmp_path.iterdir()
    assert str(written) in err
    assert "Traceback" in written.read_text()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_opens_with_its_summary(verb, capsys):
    assert main([*verb.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: shoal {verb}" in out
    assert VERBS[verb][1].split(",")[0].split(":")[0] in " ".join(out.split())


def test_help_finds_verbs_by_a_word(capsys):
    assert main(["help", "video"]) == 0
    assert capsys.readouterr().out.split()[0] == "play"


def test_train_ends_stdout_with_one_line_of_strict_json(tmp_path, monkeypatch, capsys):
    sizes = ("--agents", 2, "--steps", 1500, "--eval-episodes", 4)
    done = shoal("train", "cartpole", *sizes, "--no-report", "--json", "--out", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1], parse_constant=pytest.fail)
    assert (row["env"], row["algo"], row["agents"], row["alive"]) == ("cartpole", "ppo", 2, 2)
    assert row["env_steps"] == 2 * 1536
    assert len(row["returns"]) == 2
    assert "1,536 steps each (asked: 1,500)" in done.stderr

    monkeypatch.chdir(tmp_path)
    assert main(["show", "x"]) == main(["watch", "x"]) == main(["compare", "x", "x"]) == 0
    out, err = capsys.readouterr()
    assert "ppo.lr" in out
    assert "100%" in err


def test_a_dry_run_writes_nothing(tmp_path):
    done = shoal("train", "--dry-run", "--agents", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 agents × 4 envs" in done.stderr
    assert list(tmp_path.iterdir()) == []
