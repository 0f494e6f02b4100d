"""Logprobs of the policy by packed forward passes: padded rows in, the same shape out, no pad token in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl.model.layers import recompute_by_
from qerl.model.logprobs import Head, token_logprobs
from qerl.model.lora import kept_factors
from qerl.model.packed_attention import (
    check_config,
    deterministic_kernels,
    has_states,
    head_of,
    hidden_states,
    packed_attention_of,
)
from qerl.model.packing import Layout, PackedRow, pack, row_lengths, split_by_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qerl.plan.micro_batch_plan import MicroBatchPlan
    from training.loss.divergence import Divergences
    from training.policy.teacher import Teacher


class PackedPolicy:
    """A policy's model, the temperature its logits are divided by, and the plan of its training phase."""

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        plan: MicroBatchPlan,
        entropy_gradient: bool = False,
        deterministic: bool = False,
    ) -> None:
        """`entropy_gradient`: the loss has an entropy term; `deterministic`: a repeated step gives the same bits.

        Raises EngineError for a model that cannot be packed.
        """
        self._model, self.device = model, model.get_input_embeddings().weight.device
        check_config(model.config, self.device.type)
        self.layout = Layout(self.device, has_states(model.config))
        self._temperature, self._plan = temperature, plan
        self._entropy_gradient, self._deterministic = entropy_gradient, deterministic
        self._training = False
        self.planned = 0  # bytes at the peak of the largest micro-batch so far
        self._layers = [module for module in self._model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for layer in self._layers:
            recompute_by_(layer, self._model.get_input_embeddings().weight.dtype)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Encloses forward and backward passes, because a recomputed layer calls its attention again, but no update."""
        with packed_attention_of(self._model), deterministic_kernels(self._deterministic), kept_factors():
            self._training = True
            try:
                yield
            finally:
                self._training = False
                for layer in self._layers:
                    layer.gradient_checkpointing = False

    def logprobs(self, row: PackedRow, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies), float32: for a packed row's scored tokens, in a (B, C) block of zeros."""
        with self._read(row) as (hidden, head):
            values = token_logprobs(hidden, row.targets, head, self._entropy_gradient)
        return row.scatter(values[0], shape), row.scatter(values[1], shape)

    def divergences(
        self, row: PackedRow, shape: tuple[int, int], teacher: Teacher, taught: torch.Tensor
    ) -> Divergences:
        """How far the policy is from a teacher whose hidden states of the packed row are `taught`, each value in a
        (B, C) block of zeros."""
        with self._read(row) as (hidden, head):
            found = teacher.divergences(hidden, taught, row.targets, head)
        return type(found)(*(row.scatter(values, shape) for values in found))

    @torch.no_grad()
    def score(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        loss_mask: torch.Tensor,
        experts: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Logprobs, float32 (B, C), of any number of rows (B, L + C), a micro-batch's tokens at a time; 0 where
        `loss_mask` (B, C) is. `experts` is as in `Batch`.

        There is no dropout, as in the policy that samples.
        """
        width = loss_mask.shape[1]
        results = torch.zeros(len(input_ids), width, device=self.device)
        completions = (attention_mask[:, -width:].sum(1) * loss_mask.any(1)).tolist()
        lengths = row_lengths(input_ids[:, :-width], attention_mask[:, :-width], completions)
        with _without_dropout(self._model):
            for group in split_by_tokens(lengths, self._plan.micro_batch_tokens, states=self.layout.prompts_first):
                rows = torch.tensor(group)
                own = None if experts is None else [experts[row] for row in group]
                packed = pack(input_ids[rows], attention_mask[rows], width, self.layout, loss_mask[rows], own)
                results[rows.to(self.device)] = self.logprobs(packed, (len(group), width))[0]
        return results

    @contextmanager
    def _read(self, row: PackedRow) -> Iterator[tuple[torch.Tensor, Head]]:
        """A packed row's hidden states, and the head that turns them into logits within it.

        The adapter's factors are float32; on a GPU their products run in bfloat16.
        """
        if self._training:
            recomputed = self._plan.recomputed(row.cost)
            for index, layer in enumerate(self._layers):
                layer.gradient_checkpointing = index < recomputed
            self.planned = max(self.planned, self._plan.needed(row.cost))
        bf16 = self.device.type == "cuda" and self._model.dtype == torch.bfloat16
        with packed_attention_of(self._model), torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            yield hidden_states(self._model, row), head_of(self._model, self._temperature)


@contextmanager
def _without_dropout(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
