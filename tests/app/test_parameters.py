"""Parameters by path: what a run takes over from another, and what training leaves as it is."""

import jax
import numpy as np
import pytest

import probes
from shoal.algos import dqn, es, ppo, pqn, rppo, sac, td3
from shoal.algos.update import update
from shoal.app import afterwards, parameters, session
from shoal.app.assembly import assemble
from shoal.app.config import OutputConfig, resolve
from shoal.app.parameters import _copies, inheritance, named, within
from shoal.errors import ShoalError

FLAT = {"agents": 3, "steps": 128, "eval_episodes": 4, "devices": 2}
PPO = {"num_envs": 2, "num_steps": 32, "minibatches": 2, "epochs": 2, "hidden": (8, 4), "normalize_obs": True}
REPLAY = dict(num_envs=2, num_steps=2, minibatches=2, batch_size=8, buffer_size=64, learning_starts=2)
RING = REPLAY | {"hidden": (4,)}
DISCRETE, CONTINUOUS = probes.walk(), probes.target()
EVERY = {
    "ppo": (ppo, ppo.Sizes(num_envs=2, num_steps=8, minibatches=2, hidden=(4,)), DISCRETE),
    "rppo": (rppo, rppo.Sizes(num_envs=2, num_steps=8, minibatches=2, hidden=(4,), units=4), DISCRETE),
    "dqn": (dqn, dqn.Sizes(**RING, prioritised=True), DISCRETE),
    "pqn": (pqn, pqn.Sizes(num_envs=2, num_steps=8, minibatches=2, hidden=(4,)), DISCRETE),
    "es": (es, es.Sizes(num_envs=4, num_steps=16, hidden=(4,)), DISCRETE),
    "sac": (sac, sac.Sizes(**RING), CONTINUOUS),
    "td3": (td3, td3.Sizes(**RING), CONTINUOUS),
}


def trained(path, dotted=PPO, **flat):
    output = OutputConfig(out=str(path), root=str(path.parent), report=False, quiet=True)
    run = session.train(resolve(FLAT | flat, {flat.get("algo", "ppo"): dotted}), output)
    assert run is not None
    return run


def learner_of(run):
    """Of the newest checkpoint, leaves led by agents."""
    made = assemble(resolve({}, file=run.folder.config))
    learner = jax.device_get(session.restored(made, run.folder)[0].learner)
    return jax.tree.map(lambda x: x[: made.plan.agents], learner)


def begun(spec, dotted=PPO, **flat):
    """What agents begin with by this --init-from: (Inheritance, learner, fresh one), leaves led by agents."""
    settings = resolve(FLAT | flat | {"init_from": str(spec)}, {flat.get("algo", "ppo"): dotted})
    made = assemble(settings)
    fresh = session.fresh_state(made, session.Compiler(lambda event: None))()
    train = settings.train
    taken = inheritance(made.agent, made.knobs, made.learner, train.algo, train.init_from, ".")
    start = taken(fresh.learner, np.asarray(fresh.identity.agent))
    cut = lambda tree: jax.tree.map(lambda x: np.asarray(x)[: train.agents], tree)
    return taken, cut(start), cut(fresh.learner)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "source")


def test_all_agents_begin_with_the_best_ones_network_and_statistics_and_are_themselves(run):
    taken, start, fresh = begun(run.path)
    source, best = learner_of(run), run.result["agent_ids"].index(run.result["best_agent"])
    for name in ("params", "obs_moments", "return_moments"):
        same(getattr(start, name), jax.tree.map(lambda x: x[[best] * 3], getattr(source, name)))
    for name in ("knobs", "adam", "progress", "local"):
        same(getattr(start, name), getattr(fresh, name))
    assert taken.notes == ()


def test_each_agent_can_begin_with_the_one_of_its_number(run):
    _, start, _ = begun(f"{run.path}@all", agents=5)
    same(start.params, jax.tree.map(lambda x: x[[0, 1, 2, 0, 1]], learner_of(run).params))
    _, start, _ = begun(f"{run.path}@2")
    same(start.params, jax.tree.map(lambda x: x[[2, 2, 2]], learner_of(run).params))


def test_parts_are_taken_by_path_and_the_rest_begins_afresh(run):
    taken, start, fresh = begun(f"{run.path}@all:actor.0,critic.2.bias")
    source = learner_of(run).params
    same((start.params.actor[0], start.params.critic[2].bias), (source.actor[0], source.critic[2].bias))
    rest = lambda p: (p.actor[1:], p.critic[:2], p.critic[2].weight)
    same(rest(start.params), rest(fresh.params))
    assert taken.notes == ()
    same(start.obs_moments, learner_of(run).obs_moments)


def test_hidden_layers_fit_another_env_whose_statistics_do_not(run):
    taken, start, _ = begun(f"{run.path}@all:actor.1", env="acrobot")
    same(start.params.actor[1], learner_of(run).params.actor[1])
    assert "statistics are not taken over" in taken.notes[0]
    assert (start.obs_moments.count == 0).all()


def test_an_exported_policy_gives_all_it_has(run, tmp_path):
    policy = afterwards.export(run.path, tmp_path / "policy")
    taken, start, fresh = begun(f"{policy}@all")
    source = learner_of(run)
    same((start.params.actor, start.obs_moments), (source.params.actor, source.obs_moments))
    same(start.params.critic, fresh.params.critic)
    assert taken.notes == ("an exported policy has no critic: these begin afresh",)


def test_target_networks_begin_as_copies_of_what_was_taken(tmp_path):
    given = dict(algo="sac", env="pendulum", steps=40)
    run = trained(tmp_path / "sac", RING, **given)
    _, start, _ = begun(f"{run.path}@all", RING, **given)
    source = learner_of(run)
    same(start.params, source.params)
    same(start.target, source.params.critics)
    assert not np.array_equal(source.target[0].weight, source.params.critics[0].weight)


@pytest.mark.parametrize("algo", EVERY)
def test_what_begins_as_a_copy_of_parameters_is_found(algo):
    module, sizes, env = EVERY[algo]
    copies = _copies(probes.agent_for(env, module, sizes), module.Knobs())
    assert {path.split(".")[0] for path in copies} == ({"target"} if algo in ("dqn", "sac", "td3") else set())


@pytest.mark.parametrize(
    ("spec", "changed", "says"),
    [
        (
            "{}",
            {"hidden": (8, 5)},
            r"actor.1.weight should be float32 \[5, 8\], but there is float32 \[4, 8\]",
        ),
        ("{}:actor.9", {}, "there is no parameter actor.9"),
        ("{}", {"normalize_obs": False}, "has obs_moments.mean.0 besides"),
        ("{}@7", {}, "there is no agent '7'"),
        ("{}-none", {}, "There is no run"),
    ],
)
def test_what_does_not_fit_is_refused_with_path_and_shapes(run, spec, changed, says):
    with pytest.raises(ShoalError, match=says):
        begun(spec.format(run.path), PPO | changed)


def test_what_does_not_fit_is_refused_before_anything_compiles(run, tmp_path):
    heard = []
    settings = resolve(FLAT | {"init_from": str(run.path)}, {"ppo": PPO | {"hidden": (3,)}})
    with pytest.raises(ShoalError, match="should be"):
        session.train(settings, OutputConfig(root=str(tmp_path), quiet=True), heard.append)
    assert heard == []
    assert not list(tmp_path.iterdir())


def test_a_run_says_where_it_began_and_is_resumed_without_its_source(run, tmp_path):
    more = trained(tmp_path / "more", init_from=f"{run.path}@1:actor", steps=640)
    told = more.manifest["warm_start"]["init_from"]
    assert (told["source"], told["agents"]) == (str(run.path), [1])
    assert "params.actor.0.weight" in told["parameters"]
    config = more.folder.config
    config.write_text(config.read_text().replace(str(run.path), "gone"))
    longer = session.resume(more.path, {"steps": 700}, OutputConfig(report=False, quiet=True))
    assert longer.result["env_steps_per_agent"] == 704


def test_halving_would_bring_in_agents_that_begin_afresh():
    with pytest.raises(ShoalError, match="--halving replaces agents by fresh ones"):
        resolve(FLAT | {"halving": True, "init_from": "x"})


# --- Frozen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", EVERY)
def test_frozen_parameters_stay_and_all_others_learn(algo):
    module, sizes, env = EVERY[algo]
    agent = probes.agent_for(env, module, sizes)
    shapes = jax.eval_shape(agent.init, jax.random.key(0), module.Knobs())
    paths = [path for path, _ in named(shapes.params) if path.endswith("weight")]
    first = paths[0].rpartition(".")[0]
    held = parameters.held(agent, shapes, first)
    start = probes.alone(env, module, sizes, module.Knobs())
    step = jax.jit(jax.vmap(lambda s: update(held, env, sizes.num_steps, s)[0]))
    state = start
    for _ in range(6):
        state = step(state)
    before, after = (dict(named(s.learner.params)) for s in (start, state))
    still = {path for path in before if np.array_equal(before[path], after[path])}
    assert {path for path in before if path.startswith(f"{first}.")} <= still
    assert {path for path in before if path.endswith("weight")} - still  # something learned
    if algo == "ppo":
        assert still == {"actor.0.weight", "actor.0.bias"}
    assert step._cache_size() == 1


def test_a_run_leaves_frozen_layers_as_they_were_taken(run, tmp_path):
    more = trained(tmp_path / "more", init_from=f"{run.path}@all", freeze="actor.0, critic", steps=640)
    source, end = learner_of(run).params, learner_of(more).params
    same((end.actor[0], end.critic), (source.actor[0], source.critic))
    assert not np.array_equal(end.actor[1].weight, source.actor[1].weight)
    assert more.manifest["fingerprint"] != run.manifest["fingerprint"]


def test_frozen_parameters_have_no_gradient_so_that_its_norm_is_that_of_the_others():
    module, env = ppo, DISCRETE
    sizes = ppo.Sizes(num_envs=2, num_steps=8, minibatches=1, epochs=1, hidden=(4,))
    agent = probes.agent_for(env, module, sizes)
    start = jax.tree.map(lambda x: x[0], probes.alone(env, module, sizes, module.Knobs()))
    held = parameters.held(agent, start.learner, "critic")
    noting = held._replace(apply=lambda learner, gradient, *_: learner._replace(params=gradient))
    gradient = jax.jit(lambda s: update(noting, env, sizes.num_steps, s)[0])(start).learner.params
    assert not any(np.any(x) for x in jax.tree.leaves(gradient.critic))
    assert all(np.any(x) for x in jax.tree.leaves(gradient.actor[-1]))


@pytest.mark.parametrize(
    ("spec", "found"),
    [("a", {"a.0.w", "a.0.b", "a.1.w"}), ("a.0.w, a.1", {"a.0.w", "a.1.w"}), ("b", {"b"})],
)
def test_a_path_means_what_lies_at_or_below_it(spec, found):
    assert within("--freeze", spec, ["a.0.w", "a.0.b", "a.1.w", "ab.w", "b"]) == found
    with pytest.raises(ShoalError, match=r"no parameter a\.2"):
        within("--freeze", "a.2", ["a.0.w"])
