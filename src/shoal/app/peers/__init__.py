"""Contestants of `shoal bench ppo-cartpole`, each run by `worker.py` in a process of its own.

All but `ours` are plain scripts that know nothing of shoal, so that they run in a venv of their own. A
contestant is a file with a `start(task)`; the task is a dict of numbers:

    agents, envs          envs per agent
    steps, minibatches    of one update; an update has four epochs
    updates               of a whole training of each agent, over which the learning rate is annealed
    stretch               updates of one timed stretch
    first                 number of the first agent: what its random numbers follow from
"""
