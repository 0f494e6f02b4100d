"""The teacher of a run: whether it fits the student, and its forward pass over the student's packed rows."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl.base.errors import ConfigError
from qerl.checkpoint.folder import weights_digest
from qerl.checkpoint.load import load_model, load_tokenizer, local_folder
from qerl.checkpoint.resolve import ModelRef, describe, teacher_model
from qerl.checkpoint.shards import read_config
from qerl.formats import BF16
from qerl.model.logprobs import Head
from qerl.model.packed_attention import check_config, head_of, hidden_states, packed_attention_of
from qerl.plan.sizes import ModelSizes, sizes_of
from training.loss.divergence import Divergences, Pair, distillation_loss, token_divergences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import RunConfig
    from qerl.model.packing import PackedRow


logger = logging.getLogger(__name__)


class Teacher:
    """A frozen 16-bit model, and how the student is compared with it."""

    loss = staticmethod(distillation_loss)

    def __init__(self, folder: str | Path, config: RunConfig, device: torch.device, shared: int) -> None:
        """Open the model at `folder` on `device`; `shared`: how many tokens both vocabularies have."""
        model = config.model
        self.model = load_model(folder, BF16.name, "auto", str(device), model.trust_remote_code)
        check_config(self.model.config)
        self._temperature, self._beta = config.rollout.temperature, config.distill.beta
        self._shared = shared

    @torch.no_grad()
    def hidden(self, row: PackedRow) -> torch.Tensor:
        """The last hidden states (M, d) at a packed row's predicting positions."""
        with packed_attention_of(self.model):
            return hidden_states(self.model, replace(row, replay=None))  # these are the student's experts

    def pair(self, student: Head) -> Pair:
        """The student's head beside the teacher's, at the temperature of the loss."""
        return Pair(student, head_of(self.model, self._temperature), self._shared, self._beta)

    def divergences(self, hidden: torch.Tensor, taught: torch.Tensor, targets: torch.Tensor, head: Head) -> Divergences:
        """As `token_divergences`; `head` is the student's."""
        return token_divergences(hidden, taught, targets, self.pair(head))


@dataclass(frozen=True)
class FoundTeacher:
    """A teacher that fits, before it is loaded."""

    model: ModelRef
    folder: Path
    shared: int  # tokens that both vocabularies have

    def inputs(self) -> dict[str, str]:
        """Its digest, for run.json: a resumed run does not go on with another teacher."""
        return {"the teacher's weights": weights_digest(self.folder)}

    def opened(self, config: RunConfig, device: torch.device) -> Teacher:
        """It, loaded on `device`."""
        teacher = Teacher(self.folder, config, device, self.shared)
        logger.info("teacher: %s, divergence with beta %g", describe(self.model), config.distill.beta)
        return teacher


def find_teacher(
    config: RunConfig, base: ModelRef, tokenizer: PreTrainedTokenizerBase, sizes: ModelSizes
) -> FoundTeacher:
    """The teacher of a student on `base`, with its tokenizer and sizes.

    Raises QerlError for a model that cannot teach it; nothing is loaded but tokenizers.
    """
    found = teacher_model(config.distill.teacher, base)
    folder = local_folder(found.base, config.model.trust_remote_code)
    theirs = load_tokenizer(folder, config.model.trust_remote_code)
    check_tokenizers(tokenizer, theirs, found.base)
    own = sizes_of(read_config(folder), found.base)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if own.positions is not None and own.positions < min(longest, sizes.positions or longest):
        raise ConfigError(
            f"distill.teacher {found.base} reads {own.positions} positions, and a prompt with its completion may have "
            f"{longest}: lower rollout.max_new_tokens or data.max_prompt_tokens"
        )
    return FoundTeacher(found, folder, min(sizes.vocabulary, own.vocabulary))


def check_tokenizers(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, name: str) -> None:
    """Raise ConfigError unless both give every token the same number; warn of another chat template."""
    own, theirs = student.get_vocab(), teacher.get_vocab()
    differing = sorted(token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token))
    if differing:
        numbers = ((token, own.get(token, "none"), theirs.get(token, "none")) for token in differing[:2])
        shown = ", ".join(f"{token!r}: {mine} and {other}" for token, mine, other in numbers)
        raise ConfigError(
            f"distill.teacher {name} has another tokenizer than the student: {len(differing)} tokens have another "
            f"number ({shown}): take a teacher with the student's tokenizer, mostly one of the same family"
        )
    for kind in ("eos_token", "bos_token"):
        if (mine := getattr(student, kind)) != (other := getattr(teacher, kind)):
            raise ConfigError(
                f"distill.teacher {name} has another {kind} than the student ({other!r}, not {mine!r}), so that it "
                "would not teach where completions end: take instruct versions of both models, or base versions of both"
            )
    if student.chat_template != teacher.chat_template:
        logger.warning(
            "%s has another chat template than the student; it reads prompts that are written by the student's", name
        )
