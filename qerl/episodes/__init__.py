"""Environments: what a model talks to in episodes of several turns, and how such an episode is sampled.

    build.py      what a recipe or a caller names -> something that can be reset and stepped; what ships with qerl
    driven.py     the one form that every kind of environment takes: own classes, tools, TRL's objects
    endpoint.py   messages <-> token ids by the model's chat template; programs that ask the model by a URL
    remote.py     an environment behind a URL
    runner.py     many of them at once, each call in a thread, in this process or in one of its own
    episodes.py   the episodes of one rollout: token ids that only grow, and which of them the model wrote

Training and evaluation sample by the same `play` (qerl/episodes/play.py).
"""
