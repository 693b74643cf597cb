"""Contestants of `shoal bench`, each run by `worker.py` in a process of its own.

All but `ours` are plain scripts that know nothing of shoal, so that they run in a venv of their own. A
contestant is a file with PACKAGES, whose versions are told, and a `start(task)`, which compiles, trains
`warm_up` updates and returns

    stretch(updates) -> env steps, learn() -> returns, {"compile_s": …, "note": …}

The task is a `contest.Workload` as a dict, and

    updates    of a whole training of each agent, over which the learning rate is annealed
    warm_up    updates before the first that may be timed
    first      number of the first agent: what its random numbers follow from
    core       where there is one: the only core to use
"""
