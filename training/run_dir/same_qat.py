"""What a run trains and how it packs that, as run.json keeps it, so that no resumed run changes it in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import ConfigError
from qerl.plan.trained import masters_dtype
from training.run_dir.folder import read_about

if TYPE_CHECKING:
    from qerl.config.quant import QatConfig

KEY = "qat"  # in run.json
MAY_CHANGE = ("forward", "start_in")  # what the trainer multiplies by, and where it keeps what never changes


def qat_record(qat: QatConfig | None) -> dict[str, Any] | None:
    """What has to stay, of the recipe's section; None if it has none."""
    if qat is None:
        return None
    return {**qat.model_dump(mode="json", exclude=set(MAY_CHANGE)), "masters": masters_dtype(qat)}


def check_same_qat(run_dir: Path, qat: QatConfig | None) -> None:
    """Raise ConfigError if the recipe of a run trains or packs something else than when the run began.

    Masters and optimizer state are of what was trained, and RUN/base has the scales. A run.json of an earlier version
    does not say it.
    """
    about = read_about(run_dir)
    if KEY not in about:
        return
    before, now = dict(_flat(KEY, about[KEY])), dict(_flat(KEY, qat_record(qat)))
    changed = {key: (before.get(key), now.get(key)) for key in {**before, **now} if before.get(key) != now.get(key)}
    if not changed:
        return
    if None in (about[KEY], qat):
        what = f"{'no' if qat is None else 'a'} section qat, and it had {'one' if qat is None else 'none'}"
    else:
        what = ", ".join(f"{key}: {_shown(new)}, where it was {_shown(old)}" for key, (old, new) in changed.items())
    raise ConfigError(
        f"{run_dir / 'config.yaml'} has {what} when the run began, and what was saved since is of that: put it back, "
        "or start a new run"
    )


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Each value below `key` by its dotted key."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inner in value.items():
        yield from _flat(f"{key}.{name}", inner)
