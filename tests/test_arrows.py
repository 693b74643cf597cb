"""Imports go down only, and the front door stays light: the shape of the package, read from its source."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shoal"
LEVELS = (  # each room may import from the levels below its own, and from itself
    {"types", "errors"},
    {"envs", "ops", "mesh", "runs"},
    {"rollout", "nets"},
    {"algos"},
    {"population"},
    {"training"},
    {"app"},
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.parent != SOURCE)
FRONT_DOOR = {
    *("Agent", "AgentState", "Batch", "Box", "Discrete", "Env", "Identity", "MultiDiscrete", "Net", "Policy"),
    *("Run", "ShoalError", "Step", "check_env", "init", "load", "make_agent", "make_env", "resume", "train"),
    *("as_arrays", "update"),
}


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file imports from anywhere in it, also inside functions."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module or ""]
            if node.module == "shoal":
                names = [f"shoal.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("shoal.")}
    return rooms


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_down_only(file):
    room = file.parts[0]
    for other in imported_rooms(SOURCE / file) - {room}:
        assert LEVEL[other] < LEVEL[room], f"{file} imports shoal.{other}: {room} may not look there"


def test_the_levels_are_of_the_rooms_there_are():
    places = [path for path in SOURCE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))]
    assert {path.stem for path in places} - {"__init__"} == set(LEVEL)


def test_contributing_draws_these_arrows():
    drawn = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("imports go down only:")[1].split(". ")[0]
    assert [set(re.findall(r"`(\w+)`", level)) for level in drawn.split("→")] == [*reversed(LEVELS)]


def test_only_programs_and_the_checks_of_envs_are_compiled():
    """As CONTRIBUTING says."""
    parsed = {file: ast.walk(ast.parse((SOURCE / file).read_text("utf-8"))) for file in FILES}
    jits = {
        file.as_posix()
        for file, nodes in parsed.items()
        if any(isinstance(node, ast.Attribute) and node.attr in ("jit", "filter_jit") for node in nodes)
    }
    below = {file for file in jits if not file.startswith(("training/", "app/"))}
    assert below == {"envs/check.py", "envs/case.py"}


def test_the_front_door_is_these_names():
    import shoal

    assert set(shoal.__all__) == FRONT_DOOR
    for name in FRONT_DOOR:
        assert getattr(shoal, name) is not None


def test_importing_shoal_is_light():
    code = "import sys, shoal; print(*({'jax', 'numpy', 'tyro', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "", done.stderr
