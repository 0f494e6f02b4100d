"""The experts of a layer as linears of their own, each of which can be watched and lent the weights of a checkpoint.

transformers 5.17 multiplies by two tensors that hold all experts of a layer. llm-compressor's `linearize_moe` takes
such tensors apart; the modules here are made without weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from qerl.checkpoint.experts import LINEARIZED, Decoder


class LinearExperts(nn.ModuleList):
    """Stands in for the experts module of a layer; its linears are named as `Decoder.linearized` says."""

    def __init__(self, decoder: Decoder, act: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(_expert(decoder, dtype) for _ in range(decoder.experts))
        self._act = act

    def forward(self, hidden_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs for each token; an expert sees only the tokens it is for."""
        total_TD = torch.zeros_like(hidden_TD)
        for number, expert in enumerate(self):
            tokens, place = torch.where(chosen_TK == number)
            if len(tokens):
                x = hidden_TD[tokens]
                out = expert["down_proj"](self._act(expert["gate_proj"](x)) * expert["up_proj"](x))
                total_TD.index_add_(0, tokens, (out * weights_TK[tokens, place, None]).to(total_TD.dtype))
        return total_TD


def take_apart_(model: nn.Module, decoder: Decoder) -> None:
    """Replace the experts of each layer of a decoder that is on the meta device."""
    for layer in decoder.sparse:
        block = model.get_submodule(f"model.layers.{layer}.mlp")
        block.experts = LinearExperts(decoder, block.experts.act_fn, block.experts.down_proj.dtype)


def _expert(decoder: Decoder, dtype: torch.dtype) -> nn.ModuleDict:
    gate, up, down = LINEARIZED
    shapes = {gate: (decoder.hidden, decoder.width), up: (decoder.hidden, decoder.width)}
    shapes[down] = (decoder.width, decoder.hidden)
    return nn.ModuleDict(
        {name: nn.Linear(*shape, bias=False, device="meta", dtype=dtype) for name, shape in shapes.items()}
    )
