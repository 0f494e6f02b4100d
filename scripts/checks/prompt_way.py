#!/usr/bin/env python3
"""Print the files of ours that a prompt passes from its row to the gradient, in the order in which they are entered.

    python3 scripts/checks/prompt_way.py

It runs three steps of a small training on a CPU, on the embedded model, and records every function of ours that is
called from a step's prompts to its gradient (`_prepare_inputs` and `compute_loss` of the trainer). Setting up, logging
and saving are not on the way. Other processes and threads that began earlier are not seen.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PACKAGES = ("qerl", "training", "quantize", "eval")
SETTINGS = (
    "run.steps=3",
    "noise.num_stages=3",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=8",
)
WHILE = ("_prepare_inputs", "compute_loss")  # of the trainer


def main() -> None:
    from qerl.config.recipe import load_recipe
    from training.run import start
    from training.trainer import QerlTrainer

    entered: dict[str, str] = {}  # file -> the function by which it was entered first
    for name in WHILE:
        setattr(QerlTrainer, name, recorded(getattr(QerlTrainer, name), entered))
    with tempfile.TemporaryDirectory() as folder:
        start(load_recipe("tiny", [*SETTINGS, "model.base=tiny", "model.format=bf16", f"run.out={folder}/run"]), "tiny")
    for file, function in entered.items():
        print(f"{file}: {function}")
    print(f"{len(entered)} files")


def recorded(method: Callable[..., Any], entered: dict[str, str]) -> Callable[..., Any]:
    """The method, which notes the files of ours that are entered while it runs."""

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            entered.setdefault(str(path.relative_to(ROOT)), frame.f_code.co_qualname)

    def run(*args: Any, **kwargs: Any) -> Any:
        threading.setprofile(note)  # for the threads that begin meanwhile
        sys.setprofile(note)
        try:
            return method(*args, **kwargs)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    return run


if __name__ == "__main__":
    main()
