"""RUN/model: what a finished run has trained through the quantizer, as a packed model.

Stock vLLM and transformers read it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from qerl.checkpoint import adapter_file as sealed
from qerl.checkpoint.adapter_file import MODEL
from qerl.checkpoint.export import read_trained, write_trained
from training.run_dir.checkpoint import checkpoint_path
from training.run_dir.folder import make_aside


def settle_model(run_dir: Path, step: int) -> Path:
    """Make RUN/model of the checkpoint of `step`, unless it is there and whole; a damaged one is moved aside.

    Raises CheckpointError, and leaves nothing behind, if the checkpoint cannot be packed.
    """
    final, partial = run_dir / MODEL, run_dir / f".{MODEL}.partial"
    if sealed.damage_of(final, {"config.json"}) is None:
        return final
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
    partial.mkdir()
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        write_trained(read_trained(run_dir, checkpoint_path(run_dir, step)), partial, device)
        sealed.seal(partial)
        if final.exists():
            final.rename(make_aside(run_dir) / final.name)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
