"""docs/metrics.md lists every key that runs write, and no other."""

import re
from pathlib import Path

import pytest

from qerl.report.metrics import is_own
from tests.helpers.small_run import small_config
from tests.helpers.small_sft import small_sft
from training.run import start
from training.run_dir.log import read_metrics

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "metrics.md"
# With these settings together, runs on a CPU write every key that they can.
RUNS = {
    "terms": (
        *("data.curriculum=true", "loss.kl_coef=0.1", "loss.entropy_coef=0.01", "loss.num_iterations=2"),
        "rollout.dynamic_sampling.enabled=true",
    ),
    "episodes": ("environment={name: word_game, max_turns: 2}",),
    "distilled": ("distill.beta=1.0",),
    "carried": ("rollout.carry_over=2",),
    "sources": (
        *("loss.type=vespo", "validation.every=1", "validation.limit=2", "data.source=null", "data.limit=null"),
        "data.sources=[{name: a, source: ROWS, validation: {}}, {name: b, source: ROWS, validation: {}}]",
    ),
    "formulas": (
        *("data.task=math500", "data.columns={question: question}", "rewards=[{name: accuracy}]"),
        "loss.correction.mode=token_mask",
    ),
}
ONE_STEP = ("episodes", "distilled", "sources", "formulas")  # of which further steps would write the same keys

OF_OTHER_TESTS = ["time/reduce_s", "completions/unscored_share"]  # of several ranks, and of rewards that return None

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def written(nvfp4_base, nvfp4_moe, tmp_path_factory):
    """The keys of all runs, of which one is on a mixture of experts."""
    keys = set()
    for name, settings in RUNS.items():
        folder = tmp_path_factory.mktemp(name)
        settings = [setting.replace("ROWS", str(folder / "rows.jsonl")) for setting in settings]
        base = nvfp4_moe if name == "carried" else nvfp4_base
        steps = 1 if name in ONE_STEP else 3
        noise = f"noise.enabled={str(steps > 1).lower()}"
        start(small_config(base, folder, *settings, noise, steps=steps), "tiny")
        keys.update(key for row in read_metrics(folder / "run") for key in row)
    folder = tmp_path_factory.mktemp("given")
    validated = ("validation.every=1", "validation.split=test", "validation.limit=4", "validation.task=arith")
    start(small_sft(nvfp4_base, folder, *validated, steps=1), "sft_tiny")
    return keys | {key for row in read_metrics(folder / "run") for key in row}


def explained():
    """Keys in the first column of the page's tables; NAME in one stands for a reward's name."""
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [key for row in rows for key in re.findall(r"`([^`]+)`", row)]


def test_every_key_that_a_run_writes_is_explained(written):
    patterns = [re.compile(re.escape(key).replace("NAME", "[a-z_]+")) for key in explained()]
    assert [key for key in sorted(written) if not any(pattern.fullmatch(key) for pattern in patterns)] == []


def test_every_key_that_is_explained_is_written(written):
    """Runs here write all but the keys of memory, which only a GPU can measure, and those that other tests have."""
    patterns = {key: re.compile(re.escape(key).replace("NAME", "[a-z_]+")) for key in explained()}
    missing = [key for key, pattern in patterns.items() if not any(map(pattern.fullmatch, written))]
    missing = [key for key in missing if key not in OF_OTHER_TESTS]
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "training").rglob("*.py"))
    assert {key.partition("/")[0] for key in missing} == {"memory"}
    assert [key for key in missing if f'"{key}"' not in source] == []


def test_every_key_is_explained_once_and_is_a_name_of_the_runs_own():
    """So that no reward can log under it. What stands under grades/ and own/ is a reward's."""
    assert len(explained()) == len(set(explained()))
    of_runs = [key for key in explained() if not key.startswith(("grades/", "own/"))]
    assert [key for key in of_runs if not is_own(key)] == []
