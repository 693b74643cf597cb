"""The verbs about what there is: envs, algos, env check, env new."""

import inspect
import sys
from typing import Any

from shoal.app import catalogue, config, presets, text


def envs(
    name: str | None = None,  # show this env's settings instead
    /,
    json: bool = False,  # as JSON
) -> None:
    """List the envs, or the settings of one."""
    _on_cpu()
    if name is not None:
        env = catalogue.load_env(name)
        params = env.default_params()
        values = params._asdict() if hasattr(params, "_asdict") else {}
        _show([_setting("env", key, value.item(), type(params)) for key, value in values.items()], json)
        return
    from shoal.envs.spaces import describe

    rows = []
    for short in catalogue.envs():
        env = catalogue.load_env(short)
        params = env.default_params()
        rows.append(
            dict(
                env=short,
                observation=describe(env.obs_space(params)),
                action=describe(env.action_space(params)),
                limit=env.time_limit or None,
                presets=", ".join(_preset_of(short)),
            )
        )
    _show(rows, json)


def algos(
    name: str | None = None,  # show this algorithm's settings instead
    /,
    json: bool = False,  # as JSON
) -> None:
    """List the algorithms, or the settings of one."""
    if name is None:
        _show([_about(short, catalogue.load_algo(path)) for short, path in catalogue.algos().items()], json)
        return
    module = catalogue.load_algo(name)
    group, defaults = config.group_of(name), config.algo_defaults(module)
    rows = [
        _setting(group, key, value, module.Knobs if key in module.Knobs._fields else module.Sizes)
        for key, value in defaults.items()
    ]
    _show(rows, json)


def check(
    spec: str,  # a name of `shoal envs`, or module:make
    /,
    json: bool = False,  # as JSON
) -> int:
    """Check that an env keeps the contract; exit code 1 if it does not."""
    _on_cpu()
    from shoal.envs.check import check_env

    report = check_env(catalogue.load_env(spec))
    print(
        text.json_line({"env": report.env, "ok": report.ok, "rows": [row._asdict() for row in report.rows]})
        if json
        else report
    )
    return 0 if report.ok else 1


def new(
    name: str,  # of the env; its file is NAME.py
    /,
) -> None:
    """Write a small env of your own, and its test, into this folder."""
    from shoal.envs.template import write_new_env

    for path in write_new_env(name):
        print(path)
    print(f"next: shoal env check {name}:make_env, then shoal train {name}:make_env", file=sys.stderr)


def _preset_of(env: str) -> list[str]:
    return [
        f"{algo}, {text.count(preset.train.get('steps', config.TrainConfig.steps))} steps"
        for (name, algo), preset in presets.PRESETS.items()
        if name == env
    ]


def _about(name: str, module: Any) -> dict[str, Any]:
    about = (inspect.getdoc(module) or "").partition("\n")[0]
    return dict(algo=name, about=about, needs=getattr(module, "NEEDS", ""))


def _setting(group: str, key: str, value: Any, cls: Any) -> dict[str, Any]:
    return {"setting": f"--{group}.{key}", "default": value, "about": config.comments(cls).get(key, "")}


def _show(rows: list[dict[str, Any]], json: bool) -> None:
    if json:
        print(text.json_line(rows))
    else:
        print(text.table([{k: config.show_value(v) for k, v in row.items()} for row in rows]))


def _on_cpu() -> None:
    """Looking at an env needs no accelerator, and should not take one's memory."""
    import jax

    jax.config.update("jax_platforms", "cpu")
