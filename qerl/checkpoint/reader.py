"""Read single tensors of a checkpoint from whichever of its safetensors files holds them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.checkpoint.shards import TensorInfo

if TYPE_CHECKING:
    import torch


class TensorReader:
    """Reads a checkpoint's tensors by name, each on demand; a context manager that closes the files.

    Only one file is open at a time, because the memory map of a file that has been read stays resident.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._stack = ExitStack()
        self._open: tuple[Path, object] | None = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._open = None

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in the dtype of the file. Raises CheckpointError if the file cannot be read."""
        from safetensors import SafetensorError, safe_open

        info = self._tensors[name]
        file = info.file
        try:
            if self._open is None or self._open[0] != file:
                self._stack.close()
                self._open = (file, self._stack.enter_context(safe_open(file, framework="pt")))
            return self._open[1].get_tensor(info.stored_as or name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read from {file} ({error}): copy or download it again") from error
