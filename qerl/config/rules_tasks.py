"""What the rules ask of a task, a template and columns, wherever a recipe names them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from qerl.config.conflict import Conflict, Conflicts

COLUMNS = ("question", "answer", "id")  # the columns that a task reads
ASKING = ("prompt", "messages")  # other names of the question


def known_task(key: str, name: str) -> Conflicts:
    """There is a task of this name."""
    from qerl.data.tasks import TASKS

    names = list(TASKS)  # asking TASKS for a name would import its file
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"{key}: {near[0]} (tasks: {', '.join(names)})" if near else f"one of {', '.join(names)}"
        yield Conflict({key: name}, "there is no such task", hint)


def columns_of(key: str, columns: Mapping[str, str] | None) -> Conflicts:
    """Only columns that a task reads are mapped."""
    for column, source in (columns or {}).items():
        if column not in (*COLUMNS, *ASKING):
            meant = f"{{{source}: {column}}}" if source in COLUMNS else "{question: THEIR_NAME, answer: THEIR_NAME}"
            yield Conflict(
                {f"{key}.{column}": source},
                f"only our columns can be mapped ({', '.join(COLUMNS)})",
                f"{key}: {meant}",
            )


def template_of(key: str, template: str | None) -> Conflicts:
    """A template holds the question, and no other name."""
    from qerl.data.tasks.template_names import unknown_name

    if template is None or template == "default":
        return
    if "{question}" not in template:
        yield Conflict(
            {key: template},
            "it has no {question}, so no prompt would hold its problem",
            f"{key}: '{{question}} Put your final answer within \\boxed{{}}.', or default",
        )
    elif (name := unknown_name(template)) is not None:
        yield Conflict(
            {key: template},
            f"{{{name}}} would be printed as it stands, since only {{question}} is put in",
            f"the column {name} into the question of each row, or {{ {name} }} for the text in braces",
        )
