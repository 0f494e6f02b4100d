"""Run a model layer by layer with the weights of several checkpoints, of which one layer at a time is in memory.

The hidden states of all rows stay, so memory does not grow with the model's depth. The modules come from config.json
and hold no weights; `torch.func.functional_call` lends them those of one checkpoint after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qerl.checkpoint.source import Source

if TYPE_CHECKING:
    import torch
    from torch import nn

Tensors = Mapping[str, "torch.Tensor"]
Inputs = Mapping[str, Callable[["torch.Tensor"], "torch.Tensor"]]
EMBEDDINGS, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class LayeredModel:
    """The modules of a decoder, without weights, and what its layers are called with for rows of one length."""

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device) -> None:
        from qerl.checkpoint.load import empty_model

        self._model = empty_model(source.folder, dtype, source.trust_remote_code).eval()
        self._names = source.decoder.linearized
        if source.decoder.has_experts:
            from quantize.linear_experts import take_apart_  # it imports torch

            take_apart_(self._model, source.decoder)
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self._layers = list(self._model.model.layers)
        self._arguments: list[dict[str, Any]] = []  # of each layer, beside the hidden states

    def embed(self, sequences: Sequence[torch.Tensor], outside: Tensors) -> list[torch.Tensor]:
        """The first layer's inputs (rows, T, hidden), for token ids (rows, T) of one length. `outside` has the tensors
        beside the layers.

        The model's own forward pass computes them and the arguments of each layer, with layers that do nothing. The
        arguments are those of a single row, which fit any number of rows.
        """
        import torch

        found: list[torch.Tensor] = []
        weights = {"embed_tokens.weight": outside[EMBEDDINGS], "norm.weight": outside[NORM]}
        with self._idle_layers(found):
            for ids in (*sequences, sequences[0][:1]):
                self._arguments.clear()
                torch.func.functional_call(self._model.model, weights, (ids,), {"use_cache": False})
        return found[: -len(self._layers) : len(self._layers)]

    @contextmanager
    def _idle_layers(self, found: list[torch.Tensor]) -> Iterator[None]:
        def idle(hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
            found.append(hidden)
            self._arguments.append(arguments)
            return hidden

        try:
            for layer in self._layers:
                layer.forward = idle
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def step(
        self,
        number: int,
        weights: Tensors,
        hidden: list[torch.Tensor],
        see: Callable[[str, torch.Tensor], None] | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        """Replace the hidden states by what layer `number` with `weights` (full names) makes of them.

        `see(module, inputs)` is called with each linear's full name and its inputs (..., in). `inputs` has functions
        that give what a linear multiplies by instead, by full name.
        """
        import torch

        layer, own, in_files = self._layers[number], {}, {}
        for name, tensor in weights.items():
            module, _, leaf = name.rpartition(".")
            inside = self._names(module).removeprefix(f"model.layers.{number}.")
            own[f"{inside}.{leaf}"], in_files[inside] = tensor, module
        linears = [(in_files[name], module) for name, module in _linears(layer)]
        hooks = [] if see is None else [_watch(name, module, see) for name, module in linears]
        hooks += [_replace(module, inputs[name]) for name, module in linears if name in (inputs or {})]
        try:
            for row, states in enumerate(hidden):
                out = torch.func.functional_call(layer, own, (states,), self._arguments[number])
                hidden[row] = out[0] if isinstance(out, tuple) else out
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, hidden: torch.Tensor, outside: Tensors) -> torch.Tensor:
        """Logits (T, vocabulary) in float32 of final hidden states (T, hidden)."""
        import torch

        head = {"weight": outside.get(HEAD, outside[EMBEDDINGS])}
        if "lm_head.bias" in outside:
            head["bias"] = outside["lm_head.bias"]
        normed = torch.func.functional_call(self._model.model.norm, {"weight": outside[NORM]}, (hidden,))
        return torch.func.functional_call(self._model.lm_head, head, (normed,)).float()


def _linears(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    from torch import nn

    return [(name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear)]


def _watch(name: str, module: nn.Module, see: Callable[[str, torch.Tensor], None]) -> Any:
    return module.register_forward_pre_hook(lambda _, inputs: see(name, inputs[0]))


def _replace(module: nn.Module, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
