"""The loss of rows that are held out, by the policy as it is now. It leaves the run as it was."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from training.sft.rows import batch_of
from training.sft.trainer import SftParts, sync_

if TYPE_CHECKING:
    from training.run_dir.stop import Stop


def measure(parts: SftParts, step: int, stop: Stop) -> dict[str, float]:
    """The mean loss of all learned tokens, under validation/; each rank reads its share of the rows.

    Empty if a signal came to a rank before its share was read.
    """
    started = time.perf_counter()
    sync_(parts)
    of_ranks = parts.parallel.gather((_share(parts, stop), stop.asked))
    stop.agree(next((asked for _, asked in of_ranks if asked is not None), None))
    shares = [found for found, _ in of_ranks if found is not None]
    if len(shares) < len(of_ranks):
        return {}
    loss, tokens = (sum(part) for part in zip(*shares, strict=True))
    return {"validation/loss": loss / tokens, "time/validation_s": time.perf_counter() - started}


def _share(parts: SftParts, stop: Stop) -> tuple[float, int] | None:
    """The summed loss of this rank's rows, and their learned tokens; None if a signal came meanwhile."""
    rows = parts.rows.held_out
    own = sorted(rows[parts.parallel.span(len(rows))], key=lambda row: -len(row.ids))
    size = parts.config.sft.rows_per_step
    total, tokens = 0.0, 0
    for start in range(0, len(own), size):
        if stop.asked is not None:
            return None
        batch = batch_of(own[start : start + size], parts.tokenizer.pad_token_id)
        logprobs_B_T = parts.packed.score(*batch.tokens(), batch.loss_mask_B_T)
        total -= logprobs_B_T.double().sum().item()  # 0 where nothing is learned
        tokens += int(batch.loss_mask_B_T.sum())
    return total, tokens
