"""Ctrl-C and SIGTERM ask the loop to save and stop after its chunk; a second Ctrl-C stops at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Stop:
    """Set once something asks for an end; `reason` says what."""

    reason: str = ""

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason


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
