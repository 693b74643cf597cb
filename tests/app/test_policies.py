"""Policies come back as they were written, or the message names the file and what is wrong with it."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal.app import afterwards, catalogue, policies
from shoal.app.assembly import assemble
from shoal.app.config import resolve
from shoal.app.main import main
from shoal.envs.spaces import to_json
from shoal.errors import ShoalError
from shoal.runs import folder, manifest
from shoal.types import Box, Discrete


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run folder with the untrained policies of two agents."""
    from shoal.app.session import write_policy
    from shoal.population.lanes import identities, stacked
    from shoal.training import program

    made = assemble(
        resolve({"agents": 2, "steps": 64, "devices": 1}, {"ppo": {"hidden": (4,), "num_envs": 2}})
    )
    lanes = made.layout.lanes
    state = program.compile_init(made.recipe, made.layout)(
        identities(0, 2, 1, lanes), stacked(made.knobs, lanes), stacked(made.env_params, lanes)
    )
    run = folder.create(tmp_path_factory.mktemp("runs"), "cartpole", "ppo")
    manifest.write_json(run.manifest, {"started": "2026"})
    columns = {"return_mean": np.array([1.0, np.nan]), "env_steps": np.array([64, 64])}
    write_policy(made, run.policy, state, columns)
    return run.policy


@pytest.fixture
def policy(written, tmp_path):
    place = tmp_path / "policy"
    place.mkdir()
    for name in (policies.WEIGHTS, policies.CONTRACT):
        (place / name).write_bytes((written / name).read_bytes())
    return place


def rewrite(place, **changes):
    path = place / policies.CONTRACT
    contract = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in contract.items() if value != "gone"}))


def reweigh(place, change):
    save_file(
        {name: change(x) for name, x in load_file(place / policies.WEIGHTS).items()}, place / policies.WEIGHTS
    )


CONTRACTS = {
    "env": dict(env="gone"),
    "time_limit": dict(time_limit="gone"),
    "sizes": dict(sizes="gone"),
    "odd": dict(sizes={"odd": 1}),
    "hidden": dict(sizes="hidden"),
    "agents": dict(agents=[0, 1, 2]),
    "returns": dict(returns=["x", 1]),
    "box": dict(obs_space={"box": {}}),
}
WEIGHTS = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "garbage": lambda path: path.write_bytes(b"x" * 100),
    "one agent": lambda path: reweigh(path.parent, lambda x: np.ascontiguousarray(x[:1])),
    "float16": lambda path: reweigh(path.parent, lambda x: x.astype(np.float16)),
    "no axis": lambda path: reweigh(path.parent, lambda x: np.zeros((), np.float32)),
}


def refused(place, tmp_path, said):
    out = tmp_path / "out"
    for use in (policies.load, afterwards.play, lambda place: afterwards.export(place, out)):
        with pytest.raises(ShoalError, match=said):
            use(place)
    assert not out.exists()


@pytest.mark.parametrize("kind", CONTRACTS)
def test_a_damaged_contract_is_refused_by_file_and_key(kind, policy, tmp_path):
    changes = CONTRACTS[kind]
    if kind == "hidden":
        sizes = json.loads((policy / policies.CONTRACT).read_text())["sizes"]
        changes = {"sizes": sizes | {"hidden": "wide"}}
    rewrite(policy, **changes)
    refused(policy, tmp_path, rf"contract.json.*{'' if kind == 'box' else kind}")


@pytest.mark.parametrize("text", ["[]", "5", "{", ""])
def test_a_contract_that_is_none_is_refused(text, policy, tmp_path):
    (policy / policies.CONTRACT).write_text(text)
    refused(policy, tmp_path, "contract.json")


@pytest.mark.parametrize("kind", WEIGHTS)
def test_damaged_weights_are_refused_by_file(kind, policy, tmp_path):
    WEIGHTS[kind](policy / policies.WEIGHTS)
    refused(policy, tmp_path, "policy.safetensors")


@pytest.mark.parametrize("agents", [None, 1.5, "bets", 2, [], [0, None], {0}])
def test_agents_that_are_not_there_are_refused(agents, policy):
    with pytest.raises(ShoalError, match="there is no agent"):
        policies.load(policy, agents)


@pytest.mark.parametrize(
    ("agents", "ids", "single"),
    [
        ("best", (0,), True),
        (np.int64(1), (1,), True),
        ("1", (1,), True),
        ("all", (0, 1), False),
        (np.array([1, 0]), (1, 0), False),
        (["all"], (0, 1), False),
    ],
)
def test_agents_are_chosen_by_word_number_or_list(agents, ids, single, policy):
    found = policies.load(policy, agents)
    assert (found.agents, found._single) == (ids, single)


def test_no_envs_get_no_actions(policy):
    population, one = policies.load(policy, "all"), policies.load(policy)
    assert population.act(np.zeros((2, 0, 4))).shape == (2, 0)
    assert one.act(np.zeros((0, 4))).shape == (0,)
    empty = population.act(jax.numpy.zeros((2, 0, 4)), key=jax.random.key(0))
    assert isinstance(empty, jax.Array)
    assert empty.dtype == population.act(jax.numpy.zeros((2, 1, 4))).dtype


def test_a_path_is_not_looked_for_under_the_root(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShoalError, match="There is no run at"):
        policies.folder_of(tmp_path / written.parent.name, written.parent.parent)
    assert policies.folder_of(written.parent.name, written.parent.parent) == written
    assert policies.folder_of("last", written.parent.parent).resolve() == written.resolve()


def test_an_export_to_where_nothing_can_be_written_is_refused(written, tmp_path, capsys):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        assert main(["export", str(written.parent), "--out", str(out)]) == 2
        assert str(out) in capsys.readouterr().err


def test_an_exported_policy_is_the_run_s(written, tmp_path):
    afterwards.export(written.parent, tmp_path / "all")
    ours, theirs = (policies.load(place, "all") for place in (tmp_path / "all", written))
    assert ours.contract == theirs.contract
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_an_agent_without_a_return_can_be_filmed(policy, monkeypatch):
    films = []
    monkeypatch.setattr(afterwards, "video", SimpleNamespace(film=lambda *given: films.append(given)))
    afterwards.play(policy, 1)
    assert films[0][-1] == ["agent 1, return –"]


# --- Memory -----------------------------------------------------------------------------------


def made_of(algo, **sizes):
    """Two untrained agents, whose weights are no longer small."""
    module, spaces = catalogue.load_algo(algo), (Box(-1, 1, (3,)), Discrete(4))
    agent = policies.make_agent(algo, module.Sizes(hidden=(4,), **sizes), "auto", *spaces)
    learners = jax.vmap(agent.init, (0, None))(jax.random.split(jax.random.key(0), 2), module.Knobs())
    params = jax.tree.map(lambda x: x + 0.5, jax.vmap(agent.policy)(learners))
    spaces = dict(obs_space=to_json(spaces[0]), action_space=to_json(spaces[1]))
    return policies.Policy(agent, params, dict(algo=algo, agents=[0, 1], returns=[1, 2]) | spaces, False)


def test_a_policy_with_memory_is_asked_step_by_step():
    """Two agents, two envs; the second env's episode starts anew at the third step."""
    policy = made_of("rppo", units=3)
    obs = np.random.default_rng(0).normal(size=(5, 2, 2, 3)).astype(np.float32)
    carry, memory = None, np.zeros((2, 2, 3), np.float32)
    for t, now in enumerate(obs):
        fresh = np.array([[False, True]] * 2) if t == 2 else None
        carry, action = policy.step(carry, now, fresh=fresh)
        memory = np.where(np.zeros((2, 2, 1), bool) if fresh is None else fresh[..., None], 0, memory)
        rows = jax.vmap(policy.agent.act, (0, 0, 0, None, None))(policy.params, memory, now, None, None)
        memory, want = np.asarray(rows[0]), rows[1]
        np.testing.assert_array_equal(action, want)
        np.testing.assert_allclose(carry, memory, atol=1e-6)
        assert isinstance(action, np.ndarray)
    with pytest.raises(ShoalError, match="a policy of rppo remembers") as error:
        policy.act(obs[0])
    assert "policy.step(carry, obs)" in error.value.hint


@pytest.mark.parametrize("algo", ["es", "pqn"])
def test_other_policies_need_no_steps(algo):
    """An evolution strategy's carry is about its perturbation alone: the greedy policy has none."""
    policy, obs = made_of(algo), np.zeros((2, 5, 3), np.float32)
    np.testing.assert_array_equal(policy.act(obs), policy.step(None, obs)[1])
