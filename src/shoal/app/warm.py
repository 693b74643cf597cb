"""The verb `shoal warm`: compile what a training needs, into the cache that every process starts from."""

from typing import Any

import jax

from shoal.app import sweep, text
from shoal.app.assembly import Assembled, Compiler, assemble
from shoal.app.board import board
from shoal.app.config import Settings
from shoal.app.selecting import selector
from shoal.app.session import fresh_state
from shoal.app.warmstart import Preparation
from shoal.errors import ShoalError


def warm(
    settings: Settings,
    /,
    quiet: bool = False,  # show errors only
    json: bool = False,  # end stdout with one line of JSON
) -> None:
    """Compile what train would, so that its next start is quick.

    Takes train's options, and runs nothing. Programs are kept where every process looks for them; `again_s`
    is what compiling takes from now on: tracing, and reading them from there.
    """
    made = [assemble(part.settings) for part in sweep.programs(settings)]
    cache = getattr(jax.config, "jax_compilation_cache_dir", None)
    if cache is None:
        raise ShoalError("compiled programs are kept nowhere", "shoal doctor tells why")
    with board(quiet) as listen:
        first = Compiler(listen)
        for one in made:
            _compile(one, first)
    again = Compiler(lambda event: None)
    jax.clear_caches()  # what this process remembers, not what lies in the folder
    for one in made:
        _compile(one, again)
    result: dict[str, Any] = dict(
        env=settings.train.env,
        algo=settings.train.algo,
        programs=len(made),
        compile_s=round(first.seconds, 3),
        again_s=round(again.seconds, 3),
        cache=str(cache),
    )
    took, now = text.duration(first.seconds), text.duration(again.seconds)
    print(text.json_line(result) if json else f"compiled in {took}; a start now takes {now} of it ({cache})")


def _compile(made: Assembled, compiler: Compiler) -> None:
    """In the order in which a training does."""
    compiler.training(made)
    fresh_state(made, compiler)
    Preparation(made).compile(compiler)
    selector(made, compiler)
    compiler.evaluation(made)
