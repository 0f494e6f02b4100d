"""What becomes of a checkpoint whose outputs are bad, or that could not be checked.

One by llm-compressor's calibration is kept, by another name: that takes hours, and a person may judge otherwise than a
limit does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qerl.base.errors import CheckpointError
from qerl.checkpoint.output import set_aside
from qerl.checkpoint.verify import FailedCheck
from quantize.output_error import OutputErrors

logger = logging.getLogger(__name__)


def judge(outputs: OutputErrors, min_sqnr_db: float) -> None:
    """Raise FailedCheck for a linear whose outputs are wrong: further off than `min_sqnr_db` and than by rounding.

    Where the whole model is further off than by rounding, that is a warning.
    """
    largest = 10 ** (-min_sqnr_db / 20)
    for module, error in outputs.linears.items():
        rounded = outputs.rounded_linears.get(module, 0.0)
        if not (error <= largest or error <= rounded):  # NaN is wrong too
            raise FailedCheck(
                f"the outputs of {module} on {outputs.rows()} are wrong by {error:.0%} (rounding to nearest: "
                f"{rounded:.0%})"
            )
    if outputs.rounded and outputs.written.kl > outputs.rounded.kl:
        logger.warning(
            "on %s the model is further from the 16-bit one (KL %.2g) than by rounding to nearest (KL %.2g): give more "
            "rows, such as it will see, or write --method rtn",
            *(outputs.rows(), outputs.written.kl, outputs.rounded.kl),
        )


@contextmanager
def kept_if_calibrated(method: str | None, staging: Path, out: Path) -> Iterator[None]:
    """If the block raises, move what a calibration by `method` has written beside `out` and say where it is.

    None is for a method that takes minutes at most, of which nothing is kept.
    """
    try:
        yield
    except BaseException as error:
        if method is None:
            raise
        kept = set_aside(staging, out)
        if not isinstance(error, Exception):
            logger.warning("stopped before the check ended: the weights by %s are in %s", method, kept)
            raise
        reason = error.detail if isinstance(error, FailedCheck) else (str(error).splitlines() or [repr(error)])[0]
        raise CheckpointError(
            f"the checkpoint by {method} does not pass its check and is not at {out}: {reason}. It is kept as {kept}: "
            "use it under that name if you accept this, or give more rows, such as it will see, or write --method rtn"
        ) from error
