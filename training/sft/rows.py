"""Conversations as the rows of a step: read, marked and held to the longest row. What is left out is counted."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from qerl.base.errors import ConfigError, DataError, counted
from qerl.base.sandbox import said_of
from qerl.checkpoint.load import end_token_ids, local_folder
from qerl.data.conversations import Conversation, Source, held_out_source, load_conversations
from qerl.data.tasks import task_of
from qerl.engine.interface import check_tokens
from training.loss.batch import Batch, padded_left, padded_right
from training.sft.marking import REFUSES, Marker, UnmarkableError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig
    from qerl.plan.sizes import ModelSizes

logger = logging.getLogger(__name__)

TENTH = 10  # one of so many rows is held out, where no other rows are named


@dataclass(frozen=True)
class Row:
    """A conversation, or a part of one that ends with an answer: token ids, and 1 for those that are learned."""

    id: str
    ids: list[int]
    learned: list[int]

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first that is learned."""
        return self.learned.index(1)


@dataclass(frozen=True)
class Rows:
    """What a run learns from, and what its validations measure, if it has any."""

    trained: Sequence[Row]
    held_out: Sequence[Row] = ()

    def inputs(self) -> dict[str, str]:
        """Digests for run.json."""
        named = {"the rows of the data": self.trained, "the validation's rows": self.held_out}
        return {what: _digest(rows) for what, rows in named.items() if rows}


def read_rows(config: RunConfig, base: ModelRef, tokenizer: PreTrainedTokenizerBase, sizes: ModelSizes) -> Rows:
    """The rows that a run on `base` learns from. Raises DataError or ConfigError if it cannot learn them."""
    trusted = config.model.trust_remote_code
    folder = local_folder(base.base, trusted)
    text_config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted).get_text_config()
    marker = Marker(tokenizer, end_token_ids(folder, text_config, tokenizer), config.data.chat_template_kwargs)
    return marked_rows(config, marker, sizes)


def marked_rows(config: RunConfig, marker: Marker, sizes: ModelSizes) -> Rows:
    """The rows of a recipe as `marker` marks them."""
    data, this = config.data, config.validation
    found = load_conversations(data, task_of(data), Source(data.source, data.split, data.columns), data.limit)
    (trained, too_long), held_out = _rows(config, marker, found, "data"), []
    if this.every is not None:
        trained, held_out = _divided(config, marker, trained)
    if len(trained) < config.sft.rows_per_step:
        raise DataError(
            f"{len(trained)} usable rows are fewer than the {config.sft.rows_per_step} of a step: give more rows, "
            f"{'raise sft.max_tokens, ' if too_long else ''}or lower sft.rows_per_step"
        )
    _check_fit([*trained, *held_out], sizes)
    _say(config, trained)
    return Rows(trained, held_out)


def _divided(config: RunConfig, marker: Marker, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The rows that are learned, and those that validations measure: other ones, or the last tenth of these."""
    limit, source = config.validation.limit, held_out_source(config.data, config.validation)
    if source is not None:
        found = load_conversations(config.data, *source, None)
        return rows, _unseen(_rows(config, marker, found, "validation")[0], rows)[:limit]
    count = max(1, len(rows) // TENTH if limit is None else min(limit, len(rows) // TENTH))
    if config.data.held_out:
        count = min(config.data.held_out, len(rows))
    logger.info("validation: the last %d of %d rows are held out (validation.source names others)", count, len(rows))
    return rows[:-count], _unseen(rows[-count:], rows[:-count])[:limit]


def batch_of(rows: Sequence[Row], pad_id: int) -> Batch:
    """The rows of a step as padded tensors: prompts to the left, and what begins with the first learned token."""
    parts = [(row.prompt_tokens, torch.tensor(row.ids), torch.tensor(row.learned)) for row in rows]
    prompts, completions = [ids[:at] for at, ids, _ in parts], [ids[at:] for at, ids, _ in parts]
    return Batch(
        prompt_ids_B_L=padded_left(prompts, pad_id),
        prompt_mask_B_L=padded_left([torch.ones_like(ids) for ids in prompts], 0),
        completion_ids_B_T=padded_right(completions, pad_id),
        completion_mask_B_T=padded_right([torch.ones_like(ids) for ids in completions], 0),
        loss_mask_B_T=padded_right([learned[at:] for at, _, learned in parts], 0),
        advantages_B=torch.ones(len(rows)),
        sampling_logprobs_B_T=None,
    )


def _rows(
    config: RunConfig, marker: Marker, conversations: Sequence[Conversation], where: str
) -> tuple[list[Row], bool]:
    """The conversations as rows, and whether some were too long. Says how many were left out, and why."""
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    named: dict[str, str] = {}
    unended: Counter[int] = Counter()
    quoting, quoted = [], set()
    parts, too_long = 0, f"longer than sft.max_tokens={config.sft.max_tokens}"
    for each in conversations:
        try:
            marked = marker.rows(each)
        except UnmarkableError as error:
            left_out[str(error)] += 1
            named.setdefault(str(error), each.id)
            continue
        parts += len(marked) > 1
        if names := marker.quoted(each):
            quoting.append(each.id)
            quoted |= names
        for row in marked:
            unended.update(row.unended)
            learned = [0, *row.learned[1:]]  # the first token cannot be predicted
            if len(row.ids) > config.sft.max_tokens or not any(learned):
                left_out[too_long] += 1
                named.setdefault(too_long, each.id)
            else:
                rows.append(Row(each.id, row.ids, learned))
    for reason, count in left_out.items():
        logger.warning("%s: %s left out, %s (e.g. row %s)", where, counted(count, "row"), reason, named[reason])
    if quoting:
        logger.warning("%s: %s", where, said_of(quoting, quoted))
    if parts:
        logger.info("%s: %d conversations become a row for each answer, as the template asks for it", where, parts)
    if not rows:
        raise DataError(f"{where}: no row is left to learn from: {'; '.join(map(_with_remedy, left_out))}")
    if unended and where == "data":
        logger.warning("%s", marker.unended_text(unended))
    return rows, too_long in left_out


def _with_remedy(reason: str) -> str:
    """Why rows are left out, and what to do about it."""
    if reason.startswith("longer than"):
        return f"{reason}: raise sft.max_tokens"
    if reason.startswith(REFUSES):
        return (
            f'{reason}; if it has no system role, set data.system_prompt to "" and write the rows\' system messages '
            "into the first message of the user"
        )
    return reason


def _unseen(rows: Sequence[Row], trained: Sequence[Row]) -> list[Row]:
    known = {tuple(row.ids) for row in trained}
    unseen = [row for row in rows if tuple(row.ids) not in known]
    if not unseen:
        raise DataError(
            f"validation: all {len(rows)} rows are among the training rows: name other rows with validation.source, or "
            "train without validation (--set validation.every=null)"
        )
    if seen := len(rows) - len(unseen):
        logger.warning("validation: %d of %d rows are among the training rows and are left out", seen, len(rows))
    return unseen


def _check_fit(rows: Sequence[Row], sizes: ModelSizes) -> None:
    check_tokens((row.ids for row in rows), sizes.vocabulary)
    longest = max(len(row.ids) for row in rows)
    if sizes.positions is not None and longest > sizes.positions:
        raise ConfigError(
            f"a row has {longest} tokens and the model {sizes.positions} positions: write sft.max_tokens: "
            f"{sizes.positions}"
        )


def _say(config: RunConfig, rows: Sequence[Row]) -> None:
    tokens, learned = sum(len(row.ids) for row in rows), sum(sum(row.learned) for row in rows)
    logger.info(
        "%d rows with %d tokens, %.0f%% of them learned; %d steps of %d rows are %.2g epochs",
        *(len(rows), tokens, 100 * learned / tokens),
        *(config.run.steps, config.sft.rows_per_step, config.run.steps * config.sft.rows_per_step / len(rows)),
    )


def _digest(rows: Collection[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.ids, row.learned]).encode())
    return digest.hexdigest()[:16]
