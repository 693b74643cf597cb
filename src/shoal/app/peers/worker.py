"""One contestant in a process of its own: `python worker.py NAME TASK`; plain Python, no shoal.

It says that it is ready, and then answers each line of stdin with one of stdout, both JSON:

    {"what": "stretch", "updates": n} → {"seconds": …, "env_steps": …}   all agents together, timed
    {"what": "learn"} → {"returns": [one per agent]}   a whole training from the start, not timed

A return is the mean over an agent's episodes that ended in the last twentieth of its training, as its
sampled policy played them. When stdin ends the process does too, in the middle of whatever it does.
"""

import importlib
import importlib.metadata
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


def main(name: str, task: dict) -> None:
    if (core := task.get("core")) is not None:
        os.sched_setaffinity(0, {core})
    answer, questions = opened()
    sys.path.insert(0, str(Path(__file__).parent))
    contestant = importlib.import_module(name)
    stretch, learn, facts = contestant.start(task)
    versions = {package: importlib.metadata.version(package) for package in contestant.PACKAGES}
    answer(**facts, versions=versions)
    while True:
        question = questions.get()
        if question["what"] == "learn":
            answer(returns=learn())
            continue
        started = time.perf_counter()
        env_steps = stretch(question["updates"])
        answer(seconds=time.perf_counter() - started, env_steps=env_steps)


def opened() -> tuple[Callable[..., None], "queue.SimpleQueue[dict]"]:
    """What answers, and the questions as they come; what libraries print is no answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    questions: queue.SimpleQueue[dict] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(questions,), daemon=True).start()

    def answer(**values):
        print(json.dumps(values), file=answers, flush=True)

    return answer, questions


def listen(questions: queue.SimpleQueue) -> None:
    for line in sys.stdin:
        questions.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
