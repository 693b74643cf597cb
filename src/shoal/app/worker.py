"""A process of our own that answers in lines of JSON, each within a deadline; it ends when we do."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from shoal.errors import ShoalError

Answer = dict[str, Any]


class Worker:
    """A process of a group of its own, all of which is killed when its context is left, whatever happens.

    It reads questions from stdin and writes answers to stdout, one line of JSON each: see `peers/worker.py`.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        self.name, self.command, self.environment = name, list(command), dict(environment)
        self.facts: Answer = {}

    def __enter__(self) -> "Worker":
        self.complaints: IO[bytes] = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # not waited for yet, so the number is still its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.complaints):
            with contextlib.suppress(OSError):
                file.close()  # type: ignore[union-attr]

    def tell(self, question: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: the answer says of what
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()

    def ready(self, within_s: float) -> Answer:
        """Wait until it has started, and keep the facts that it tells of itself."""
        self.facts = self._answer("start", within_s)
        return self.facts

    def ask(self, what: str, within_s: float, **given: int) -> Callable[[], Answer]:
        """Ask for something; the function returned waits for the answer."""
        self.tell(dict(what=what, **given))
        return lambda: self._answer(what, within_s)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def _answer(self, what: str, within_s: float) -> Answer:
        try:
            line = self.answers.get(timeout=within_s)
        except queue.Empty:
            raise ShoalError(
                f"{self.name} has not answered {what!r} within {within_s:g} s", "run it alone"
            ) from None
        if not line:
            raise ShoalError(f"{self.name} ended while asked to {what}; {self._end()}", self.command[0])
        return json.loads(line)

    def _end(self) -> str:
        """The signal that ended it, or else the last that it said."""
        code = self.process.wait(10)
        self.complaints.seek(0)
        said = self.complaints.read().decode(errors="replace").strip().splitlines() or ["nothing"]
        error = next((line for line in reversed(said) if re.match(r"[\w.]+: ", line)), said[-1])
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it said: {error}"
