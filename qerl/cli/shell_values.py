"""What a shell completes after an option: recipes, tasks, cards and keys.

Every start of `qerl` imports this, so it imports nothing heavy.
"""

from __future__ import annotations


def recipe_values(incomplete: str) -> list[str]:
    """Names of shipped recipes."""
    from qerl.config.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def task_values(incomplete: str) -> list[str]:
    """Names of tasks."""
    from qerl.data.tasks import TASKS

    return [name for name in TASKS if name.startswith(incomplete)]


def card_values(incomplete: str) -> list[str]:
    """Cards that `qerl plan` knows."""
    from qerl.plan.cards import CARDS

    return [name for name in CARDS if name.startswith(incomplete)]


def key_values(incomplete: str) -> list[str]:
    """Keys of a recipe, as `--set` takes them."""
    from qerl.config.keys import describe_config

    return [f"{key.key}=" for key in describe_config() if key.key.startswith(incomplete)]
