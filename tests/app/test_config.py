from types import SimpleNamespace

import pytest

from shoal.algos import ppo
from shoal.app import presets
from shoal.app.commandline import call, read_train, split_dotted
from shoal.app.config import (
    Duration,
    Settings,
    TrainConfig,
    _countable,
    algo_defaults,
    comments,
    convert,
    read_recorded,
    reopen,
    resolve,
    set_params,
    split_algo,
    to_toml_tables,
)
from shoal.envs import cartpole
from shoal.errors import ShoalError
from shoal.runs.manifest import write_toml


@pytest.fixture
def preset(monkeypatch):
    made = presets.Preset("test", dict(steps=7000, agents=5), dict(lr=1e-3, epochs=2))
    monkeypatch.setitem(presets.PRESETS, ("cartpole", "ppo"), made)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nagents = 6\nseed = 3\n[ppo]\nepochs = 3\nhidden = [8]\n[env]\ngravity = 5.0\n")
    return path


def test_later_layers_win_and_every_value_knows_its_origin(preset, file):
    settings = resolve({"agents": "7"}, {"ppo": {"hidden": "4,4"}}, file)
    assert settings.train == TrainConfig(agents=7, steps=7000, seed=3)
    assert (settings.algo["lr"], settings.algo["epochs"], settings.algo["hidden"]) == (1e-3, 3, (4, 4))
    assert settings.env == {"gravity": 5.0}
    origins = {
        "agents": "command line",
        "steps": "preset",
        "seed": "file mine.toml",
        "keep": "default",
        "ppo.lr": "preset",
        "ppo.epochs": "file mine.toml",
        "ppo.hidden": "command line",
        "ppo.gamma": "default",
        "env.gravity": "file mine.toml",
    }
    assert origins.items() <= settings.origins.items()
    assert set(settings.origins) >= {*vars(TrainConfig()), *(f"ppo.{name}" for name in settings.algo)}


def test_the_env_of_the_command_line_decides_the_preset(preset, file):
    assert resolve({}, {}, file).train.steps == 7000
    assert resolve({"env": "my_module:make"}, {}, file).train.steps == TrainConfig.steps


def test_an_explicit_default_wins_over_a_preset(preset):
    settings = resolve({"agents": 16})
    assert (settings.train.agents, settings.origins["agents"]) == (16, "command line")


def test_a_recorded_run_reads_back_equal_with_its_origins(tmp_path, preset):
    path = tmp_path / "config.toml"
    settings = resolve({"for_s": "10m", "seed": 4}, {"ppo": {"lr": "1e-4"}, "env": {"gravity": "5"}})
    write_toml(path, *to_toml_tables(settings))
    again = reopen(path)
    assert (again.train, again.algo, again.env) == (settings.train, settings.algo, settings.env)
    known = read_recorded(path)[1]
    assert known == {name: settings.origins[name] for name in known}
    longer = reopen(path, {"steps": 9000})
    assert longer.train.steps == 9000
    assert {name for name in again.origins if again.origins[name] != longer.origins[name]} == {"steps"}


@pytest.mark.parametrize(
    ("explicit", "dotted", "said"),
    [
        ({"agnets": 3}, {}, "agents"),
        ({"lr": 1e-3}, {}, "--ppo.lr, or ppo={'lr': …} in Python"),
        ({}, {"ppo": {"lrr": 1}}, "ppo.lr"),
        ({}, {"pop": {"lr": 1}}, "ppo"),
        ({"agents": "many"}, {}, "agents = 'many' is not a whole number"),
        ({"agents": 0}, {}, "--agents 0 must be at least 1"),
        ({"device": "cup"}, {}, "auto, cpu, gpu, tpu"),
        ({"for_s": "10 parsecs"}, {}, "10m"),
        ({"algo": "pop"}, {}, "did you mean ppo?"),
        ({}, {"ppo": {"lr": "fast"}}, "ppo.lr = 'fast' is not a number"),
        ({}, {"ppo": {"minibatches": 5}}, "not divisible"),
        ({}, {"ppo": {"anneal": "maybe"}}, "true or false"),
        ({"stop_at": "nan"}, {}, "stop_at = 'nan' is not"),
        ({}, {"ppo": {"lr": float("nan")}}, "ppo.lr = nan is not a number"),
        ({}, {"ppo": {"gamma": 1.5}}, "--ppo.gamma 1.5 must be from 0 to 1"),
        ({}, {"ppo": {"lr": "-1"}}, "--ppo.lr -1 must be at least 0"),
        ({}, {"ppo": {"lr": "inf"}}, "--ppo.lr inf must be from 0 to"),
        ({}, {"ppo": {"clip": -0.1}}, "--ppo.clip -0.1 must be at least 0"),
        ({"seed": 2**32}, {}, "--seed 4294967296 must be from 0 to 4,294,967,295"),
        ({"agents": 2**31}, {}, "--agents"),
        ({"eval_episodes": 2**31}, {}, "--eval-episodes"),
        ({"time_limit": 2**31}, {}, "--time-limit"),
        ({"time_limit": -1}, {}, "--time-limit -1 must be at least 0"),
        ({"devices": 100_000}, {}, "--devices"),
        ({"steps": "1e30"}, {}, "updates of 512 steps, more than 2,147,483,647"),
        ({}, {"ppo": {"num_envs": 2**31}}, "--ppo.num_envs"),
        ({}, {"ppo": {"num_envs": 2**30}}, "num_envs * num_steps"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_be_right(explicit, dotted, said):
    with pytest.raises(ShoalError, match=None) as caught:
        resolve(explicit, dotted)
    assert said in str(caught.value)


def test_a_folder_is_no_settings_file(tmp_path):
    with pytest.raises(ShoalError, match="cannot be read: Is a directory"):
        resolve({}, {}, tmp_path)


def test_a_clip_may_be_switched_off():
    assert resolve({}, {"ppo": {"max_grad_norm": "inf"}}).algo["max_grad_norm"] == float("inf")


def test_the_last_of_everything_is_accepted():
    settings = resolve({"seed": 2**32 - 1, "steps": 512 * (2**31 - 1)})
    assert settings.train.seed == 2**32 - 1


def test_an_algorithm_of_ones_own_needs_no_ranges():
    module = SimpleNamespace(Knobs=ppo.Knobs, Sizes=ppo.Sizes, __name__="mine")
    knobs, _ = split_algo(module, algo_defaults(module) | {"gamma": 1.5})
    assert knobs.gamma == 1.5


def test_updates_and_rows_of_any_algorithm_can_be_counted():
    with pytest.raises(ShoalError, match="updates of 1 steps"):
        _countable(TrainConfig(steps=2**31), SimpleNamespace(num_envs=1, num_steps=1))
    with pytest.raises(ShoalError, match=r"num_envs \* num_steps"):
        _countable(TrainConfig(), SimpleNamespace(num_envs=2**16, num_steps=2**16))


@pytest.mark.parametrize("value", ["nan", float("nan"), "1e300", "x"])
def test_an_env_setting_is_a_number_that_fits(value):
    defaults = cartpole.make().default_params()
    with pytest.raises(ShoalError, match=r"env\.gravity"):
        set_params(defaults, {"gravity": value})


@pytest.mark.parametrize("text", ["agents = 3", "[train]\nagnets = 3", "[ppo]\nlr = 'x'", "[train\n"])
def test_a_wrong_file_is_a_mistake_with_words(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ShoalError):
        resolve({}, {}, path)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("500_000", int, 500_000),
        ("1e6", int, 1_000_000),
        (3, float, 3.0),
        ("-1e-3", float, -1e-3),
        ("false", bool, False),
        ("64, 32", tuple[int, ...], (64, 32)),
        (64, tuple[int, ...], (64,)),
        ("none", float | None, None),
        ("90", Duration, 90.0),
        ("1.5h", Duration | None, 5400.0),
        (30.0, Duration, 30.0),
    ],
)
def test_text_and_values_are_read_alike(value, kind, expected):
    got = convert("x", value, kind)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(("value", "kind"), [(True, int), (1.5, int), ("1,5", int), (3, str), ("inf", int)])
def test_nothing_is_bent_into_another_type(value, kind):
    with pytest.raises(ShoalError):
        convert("x", value, kind)


def test_env_settings_keep_the_dtypes_of_the_defaults():
    defaults = cartpole.make().default_params()
    changed = set_params(defaults, {"gravity": 5})
    assert float(changed.gravity) == 5.0
    assert [x.dtype for x in changed] == [x.dtype for x in defaults]
    with pytest.raises(ShoalError, match=r"env\.gravity"):
        set_params(defaults, {"gravty": 5})


def test_dotted_settings_are_taken_out_in_every_spelling():
    words = ["cartpole", "--ppo.lr", "3e-4", "--ppo.anneal", "--env.gravity=-9.8", "--ppo.clip-value", "no"]
    rest, dotted = split_dotted([*words, "--seed", "1"])
    assert rest == ["cartpole", "--seed", "1"]
    assert dotted == {"ppo": {"lr": "3e-4", "anneal": "true", "clip_value": "no"}, "env": {"gravity": "-9.8"}}


def test_the_command_line_reads_config_and_output(file):
    words = ["acrobot", "--config", str(file), "--for=10m", "--stop-at", "-90", "--no-report", "--ppo.lr=1"]
    settings, output = read_train(words)
    assert settings.train.env == "acrobot"
    assert (settings.train.for_s, settings.train.stop_at, settings.train.seed) == (600.0, -90.0, 3)
    assert settings.algo["lr"] == 1.0
    assert (output.report, output.json) == (False, False)


def test_every_setting_says_what_it_is():
    assert set(comments(TrainConfig)) == set(vars(TrainConfig()))


@pytest.mark.parametrize("spec", presets.PRESETS, ids="-".join)
def test_every_preset_resolves(spec):
    env, algo = spec
    settings = resolve({"env": env, "algo": algo})
    assert all(settings.origins[name] == "preset" for name in presets.PRESETS[spec].train)


def test_a_verb_about_a_training_takes_its_settings_beside_options_of_its_own():
    def verb(settings: Settings, /, rounds: int = 1, out: str | None = None):
        """Do something."""
        return settings, rounds, out

    words = ["acrobot", "--agents", "3", "--ppo.lr", "1e-3", "--sweep", "ppo.clip=0.1,0.2", "--rounds", "2"]
    settings, rounds, out = call(verb, words, "shoal verb")
    assert (settings.train.env, settings.train.agents, settings.algo["lr"]) == ("acrobot", 3, 1e-3)
    assert settings.train.sweep == ("ppo.clip=0.1,0.2",)
    assert settings.origins["agents"] == "command line"
    assert (rounds, out) == (2, None)
    with pytest.raises(ShoalError, match="no option --root"):
        call(verb, ["--root", "x"], "shoal verb")
