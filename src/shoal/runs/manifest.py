"""A run's small plain-text records: what it ran on (JSON) and with which settings (TOML).

Every file is replaced in one step, so a reader or a crash sees the old one or the new one, never half.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import secrets
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import ShoalError

PACKAGES = (
    *("shoal", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "numpy", "optax"),
    *("equinox", "orbax-checkpoint", "gymnasium", "gymnax", "minatar", "mujoco", "mujoco-mjx"),
)

RESTORE = "Restore the file or start a new run."


def collect(**extra: Any) -> dict[str, Any]:
    """The facts that a result depends on, for `manifest.json`; `extra` (devices, seed, …) is added.

    No host or user name: a run folder is made to be shared.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": versions(),
        **extra,
    }


def write_json(path: Path, value: Any) -> None:
    """Write `value` as strict, indented JSON in one step; see `to_json`. OSError where it cannot."""
    write_atomic(path, to_json(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. A ShoalError names the file and line if it is damaged; OSError if it is absent."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ShoalError(f"{path} is not valid JSON: {error}", RESTORE) from error


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON object that has at least `keys`; a ShoalError names the file and what is wrong with it."""
    with reading(path):
        found = read_json(path)
    if not isinstance(found, dict):
        raise ShoalError(f"{path} is damaged: it holds {found!r:.60}, not an object", RESTORE)
    if missing := [key for key in keys if key not in found]:
        raise ShoalError(f"{path} is damaged: it has no {', '.join(missing)}", RESTORE)
    return found


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around the few lines that take a file's contents apart: what fails there is the file's fault.

    A ShoalError names the file and what is missing or strange.
    """
    try:
        yield
    except OSError as error:
        raise ShoalError(f"Cannot read {path}: {error.strerror or error}", RESTORE) from error
    except KeyError as error:
        raise ShoalError(f"{path} is damaged: it has no {error.args[0]}", RESTORE) from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ShoalError(f"{path} is damaged: {error}", RESTORE) from error


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON text: NumPy values become plain, NaN and infinities (not JSON) become null."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def write_toml(path: Path, settings: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> None:
    """Write scalars, lists and one level of tables as TOML that `tomllib` reads back equal.

    `origins` gives where a value came from, by key (`"seed"`, `"ppo.lr"`), shown as a comment.
    None, which TOML lacks, is left out. TypeError for anything deeper or stranger.
    """
    origins = origins or {}
    tables = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    lines = _toml_lines({k: v for k, v in settings.items() if k not in tables}, origins)
    for name, table in tables.items():
        lines += ["", f"[{_toml_key(name)}]", *_toml_lines(table, origins, f"{name}.")]
    write_atomic(path, "\n".join(lines).lstrip("\n") + "\n")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. A ShoalError names the file and line of a syntax error, or the absent file."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ShoalError(f"There is no file {path}") from error
    except ValueError as error:  # bad TOML or bad UTF-8; tomllib's text ends with the line and column
        raise ShoalError(f"{path}: {error}", "Strings need quotes; one `key = value` per line.") from error


def write_atomic(path: Path, text: str) -> None:
    """Replace a file by one that is already safe on disk (written beside it, synced, renamed over it)."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _toml_lines(table: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "") -> list[str]:
    pairs = [
        (f"{_toml_key(key)} = {_toml_value(value)}", origins.get(prefix + key))
        for key, value in table.items()
        if value is not None
    ]
    width = max((len(pair) for pair, origin in pairs if origin), default=0)
    return [f"{pair:{width}}  # {origin}" if origin else pair for pair, origin in pairs]


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):  # JSON's escapes are TOML's, but TOML also wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    raise TypeError(f"no TOML for {type(value).__name__}: {value!r}")


def _command() -> str:
    """The command as a reader would type it: no path of this machine's interpreter."""
    program, *arguments = sys.argv
    if Path(program).name == "shoal":
        return shlex.join(["shoal", *arguments])
    return shlex.join(["python", *sys.orig_argv[1:]])


def versions() -> dict[str, str]:
    """Versions of the packages that a result depends on, of those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git() -> dict[str, Any] | None:
    """Commit of the working directory and whether tracked files differ from it; None outside git."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        status = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    lines = status.splitlines()
    commit = next(line.split()[-1] for line in lines if line.startswith("# branch.oid"))
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}
