"""Where in the user's own code an exception comes from: the one line of a traceback they can change."""

import sysconfig
from pathlib import Path
from traceback import extract_tb

NOT_THEIRS = (*(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")), "<")
SHOAL = str(Path(__file__).parents[1])


def place(error: BaseException) -> str:
    """`file:line` of the innermost frame that is neither ours nor a library's, or nothing."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*NOT_THEIRS, SHOAL)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def describe(error: BaseException) -> str:
    """`KeyError: 'x'`, and the user's file and line where there is one."""
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    where = place(error)
    return f"{text} (at {where})" if where and where not in text else text
