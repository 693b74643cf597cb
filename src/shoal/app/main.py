"""The command `shoal`: find the verb, call it, and turn what goes wrong into words and an exit code.

Exit codes: 0 done, 1 unexpected failure (or a check that failed), 2 a mistake that the message explains.
Verbs are imported when called, so that help and listings never wait for jax.
"""

import contextlib
import importlib
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

from shoal.errors import ShoalError

# verb → (module:function, what it does); the first line of `shoal help VERB` is the same sentence
VERBS = {
    "train": ("training:train", "Train many agents on one env, in one program"),
    "warm": ("warm:warm", "Compile what train would, so that its next start is quick"),
    "resume": ("training:resume", "Continue a run where it stopped, or for longer"),
    "eval": ("training:evaluate", "Score a run's agents again"),
    "play": ("training:play", "Make a video of an agent"),
    "export": ("training:export", "Copy the trained policies for use elsewhere"),
    "runs": ("past:runs", "List and filter runs"),
    "runs rm": ("past:remove", "Remove runs, after asking"),
    "show": ("past:show", "Show a run's result, and each setting with its origin"),
    "compare": ("past:compare", "Compare the returns of two runs"),
    "watch": ("watch:watch", "Watch a live run from another terminal"),
    "report": ("past:report", "Write a run's report.html again"),
    "envs": ("listing:envs", "List the envs, or the settings of one"),
    "algos": ("listing:algos", "List the algorithms, or the settings of one"),
    "env check": ("listing:check", "Check that an env keeps the contract"),
    "env new": ("listing:new", "Write a small env of your own, and its test"),
    "modes": ("bench:modes", "Measure how best to run N agents here"),
    "doctor": ("doctor:doctor", "Check this machine, with the line that fixes each problem"),
    "bench": ("bench:profile", "Measure training on this machine's CPU or GPU"),
    "bench ppo-cartpole": ("bench:ppo_cartpole", "Measure PPO beside others' programs"),
    "bench dqn-cartpole": ("bench:dqn_cartpole", "Measure DQN beside others' programs"),
    "bench scaling": ("bench:scaling", "Measure time and memory per agent as agents and envs grow"),
    "bench pbt": ("bench:pbt", "Measure PBT against random search"),
    "bench peers": ("bench:peers", "Install the programs to compare with"),
    "bench act": ("bench:act", "Measure how fast trained agents act"),
    "bench overhead": ("bench:overhead", "Measure what rows, progress and checkpoints cost"),
    "bench presets": ("bench:presets", "Measure again what every preset scores"),
}

USAGE = """shoal trains many RL agents in one program.

  shoal train cartpole            train 16 agents
  shoal train cartpole --help     every option
  shoal doctor                    is this machine ready?

{verbs}

Every verb takes --help, and --trace for the whole of an error. `shoal help WORD` finds verbs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    trace = "--trace" in words
    words = [word for word in words if word != "--trace"]
    if logging.lastResort is not None:  # it writes warnings to stderr, whoever holds that just then
        logging.getLogger().addHandler(logging.lastResort)
    try:
        return _run(words)
    except SystemExit as stop:  # tyro, after help or a misspelt option
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `shoal runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush into
        return 0
    except ShoalError as error:
        if trace:
            traceback.print_exc()
        _complain(error.message, error.hint)
        return 2
    except Exception as error:
        if trace:
            traceback.print_exc()
        _complain(*_unexpected(error))
        return 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("help", "-h", "--help"):
        return _help(words[1:])
    if words[0] == "--version":
        from importlib.metadata import version

        print(version("shoal"))
        return 0
    size = 2 if " ".join(words[:2]) in VERBS else 1
    verb = " ".join(words[:size])
    parts = [name for name in VERBS if name.startswith(f"{verb} ")]
    if verb not in VERBS or (parts and words[1:] and not words[1].startswith("-")):
        from shoal.app.config import nearest

        if parts and verb not in VERBS:
            raise ShoalError(f"shoal {verb} needs one more word", f"shoal {', shoal '.join(parts)}")
        asked = " ".join(words[:2]) if parts else verb
        raise ShoalError(
            f"there is no verb {asked!r}", f"{nearest(asked, VERBS)} shoal help lists all".strip()
        )
    module, name = VERBS[verb][0].split(":")
    function = getattr(importlib.import_module(f"shoal.app.{module}"), name)
    if verb == "train":  # its options are fields of the config, not arguments
        return int(function(words[size:]) or 0)
    from shoal.app.commandline import call

    return int(call(function, words[size:], f"shoal {verb}") or 0)


def _help(words: Sequence[str]) -> int:
    """All verbs, those that a word is about, or the whole help of the one it names."""
    word = " ".join(words).lower()
    if word in VERBS:
        return _run([*word.split(), "--help"])
    lines = [f"  {verb:<14} {text}" for verb, (_, text) in VERBS.items() if word in f"{verb} {text}".lower()]
    if not lines:
        raise ShoalError(f"no verb is about {word!r}", "shoal help lists all")
    print("\n".join(lines) if word else USAGE.format(verbs="\n".join(lines)).strip())
    return 0


def _complain(message: str, hint: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        print(f"error: {message}", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)


def _unexpected(error: Exception) -> tuple[str, str]:
    """One short block about an error nobody foresaw; the whole traceback goes to a file."""
    from shoal.app.blame import describe

    hint = "--trace shows the whole of it"
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile("w", prefix="shoal-", suffix=".txt", delete=False) as log:
            log.write("".join(traceback.format_exception(error)))
        hint = f"the whole of it is in {log.name}"
    return describe(error), hint


if __name__ == "__main__":
    sys.exit(main())
