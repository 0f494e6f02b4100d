"""Dynamic sampling on TRL's trainer: samples and grades groups by the trainer's own methods, before it scores them.

TRL 1.16 samples, grades and scores in one method. With dynamic sampling the step's groups are sampled and graded here,
as often as it takes, and TRL is then given those that were kept: its lengths, advantages, old logprobs and logged
completions are of the batch that is trained on.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from training.rollout.dynamic_sampling import Batch, Group, extra_order, fill_batch, informative_groups

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from training.trainer import QerlTrainer


class GroupSampler:
    """The groups of one step."""

    def __init__(self, trainer: QerlTrainer, config: RunConfig) -> None:
        self._trainer = trainer
        self._config = config
        self._group_size = config.rollout.group_size
        self._logged: dict[str, list[tuple[float, int]]] = defaultdict(list)  # (mean, groups) of what rewards logged

    def fill(self, rows: list[int], step: int) -> Batch:
        """The batch of the step at `step`, whose own rows are `rows`."""
        order = extra_order(len(self._trainer.train_dataset), self._config.run.seed, step)
        batch = fill_batch(self._draw, rows, order, self._config.rollout.dynamic_sampling.max_extra_rollouts)
        for name, means in self._logged.items():
            groups = sum(count for _, count in means)
            self._trainer._pending_metrics[name] = [sum(mean * count for mean, count in means) / groups]
        return batch

    def inputs(self, rows: list[int]) -> list[dict[str, Any]]:
        """What TRL calls a batch: each row of the data set once for each completion."""
        return [self._trainer.train_dataset[row] for row in rows for _ in range(self._group_size)]

    def metrics(self, batch: Batch) -> dict[str, float]:
        """With the mean rewards of all that was sampled: the kept groups are a choice of undecided ones."""
        rewards = torch.cat([group.rewards for group in batch.sampled])
        names = [f"sampled/{name}" for name in self._trainer.reward_func_names]
        return {
            **batch.metrics(),
            "sampled/reward": self._total(rewards).mean().item(),
            **dict(zip(names, rewards.mean(0).tolist(), strict=True)),
        }

    def _draw(self, rows: list[int]) -> list[Group]:
        trainer, size = self._trainer, self._group_size
        inputs = self.inputs(rows)
        trainer.expect_answers(inputs)
        prompts = [row["prompt"] for row in inputs]
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
        ids, logprobs = trainer._generate_single_turn(prompt_ids, images, fields, size)
        texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        rewards = trainer._calculate_rewards(inputs, prompts, texts, ids)  # (P*G, rewards)
        self._take_logged(len(rows))
        totals = self._total(rewards).view(len(rows), size)
        informative = informative_groups(totals, torch.tensor([self._in_loss(row) for row in ids]).view(-1, size))
        parts = [slice(first, first + size) for first in range(0, len(ids), size)]
        return [
            Group(row, ids[part], logprobs[part], rewards[part].cpu(), signal)
            for row, part, signal in zip(rows, parts, informative, strict=True)
        ]

    def _total(self, rewards: torch.Tensor) -> torch.Tensor:
        """Sum of weight * reward, as TRL's advantages are made of: (..., rewards) -> (...)."""
        return (rewards.cpu() * self._trainer.reward_weights.cpu()).sum(-1)

    def _in_loss(self, ids: list[int]) -> bool:
        """Whether a completion enters the loss; a truncated one does not, if the recipe says so."""
        ends = (*self._trainer.eos_token_ids, self._trainer.processing_class.pad_token_id)
        return not self._config.loss.mask_truncated or ids[-1] in ends

    def _take_logged(self, groups: int) -> None:
        """Metrics that rewards logged of this rollout; TRL would weigh a rollout of one prompt like one of many."""
        for name, values in self._trainer._pending_metrics.items():
            self._logged[name].append((sum(values) / len(values), groups))
        self._trainer._pending_metrics.clear()
