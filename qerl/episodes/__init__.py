"""Environments: what a model talks to in episodes of several turns, and how such an episode is sampled.

    source.py, build.py   what a recipe or a caller names -> something that can be reset and stepped
    driven.py             the one form that every kind of environment takes: own classes, tools, TRL's objects
    host.py, runner.py    many of them at once, each call in a thread, in this process or in one of its own
    chat.py               messages -> token ids by the model's chat template, and token ids -> tool calls
    episodes.py           the episodes of one rollout: token ids that only grow, and which of them the model wrote

Training and evaluation sample by the same `play` (qerl/episodes/play.py).
"""
