"""Ctrl-C and SIGTERM ask the loop to save and stop after its chunk; a second Ctrl-C stops at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Stop:
    """Unset until something asks for an end."""

    reason: str = ""  # what asked, in words
    complete: bool = False  # the end was part of the plan: evaluate and report, as after the full budget

    def ask(self, reason: str, complete: bool = False) -> None:
        if not self.reason:
            self.reason, self.complete = reason, complete

    @property
    def early(self) -> bool:
        """Asked to end before the plan was fulfilled: only save."""
        return bool(self.reason) and not self.complete

    def __bool__(self) -> bool:
        return bool(self.reason)


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Signals set the yielded Stop while the block runs. Outside the main thread there are none to catch."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, _frame: object) -> None:
        if stop.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.ask("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
