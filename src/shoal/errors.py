"""The one error a user is meant to read: what went wrong, and what to do next; and what numbers may be."""

from collections.abc import Mapping

INT32 = 2**31 - 1  # the most that is counted on a device
LARGEST = (2 - 2**-23) * 2.0**127  # float of 32 bits


class ShoalError(Exception):
    """A mistake we can explain. The command line prints `message` and `hint` and exits with 2."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.message = message
        self.hint = hint


def check_counts(group: str, values: Mapping[str, int], *names: str) -> None:
    """ShoalError unless each of these settings of a group is from 1 to what int32 holds."""
    for name in names:
        if not 1 <= values[name] <= INT32:
            raise ShoalError(f"--{group}.{name} {values[name]} must be from 1 to {INT32:,}")
