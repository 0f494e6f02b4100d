"""A run that dies at any file operation continues or begins anew, to the same numbers.

QERL_TEST_KILLS=all tries every operation, a number so many of them; the first of each run are always among them.
"""

import os
import random
import shutil

import pytest
import torch

from qerl.config.recipe import save_config
from tests.helpers.kill_process import run_and_die
from tests.helpers.run_process import forked
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.run import resume, start

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(7200)]
TRIED = os.environ.get("QERL_TEST_KILLS", "2")
STEPS = 2


@pytest.fixture(scope="module")
def run(nvfp4_base, tmp_path_factory):
    """(configuration, recipe, what was left by a run that nobody killed, names of its file operations)."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("killed")
    config = small_config(
        nvfp4_base, folder, "run.keep_checkpoints=1", "run.save_every=1", "noise.enabled=false", steps=STEPS
    )
    save_config(config, folder / "recipe.yaml")
    child = forked(run_and_die, folder / "recipe.yaml", folder / "run", 0, folder / "operations")
    child.join(120)
    assert child.exitcode == 0
    (folder / "run").rename(folder / "whole")
    return config, folder, (folder / "operations").read_text().splitlines()


def test_a_run_that_dies_at_a_file_operation_ends_with_the_same_numbers(run):
    config, folder, operations = run
    assert {"fsync config.partial", "os.rename config.partial", "open metrics.jsonl"} < set(operations)
    for begun in ("os.mkdir checkpoints/.step", "os.rename .adapter.partial"):
        assert any(each.startswith(begun) for each in operations)
    places = range(1, len(operations) + 1)
    begin = operations.index("fsync config.partial") + 1
    tried = places if TRIED == "all" else [begin, *random.Random(0).sample(places, int(TRIED))]
    for at in tried:
        child = forked(run_and_die, folder / "recipe.yaml", folder / "run", at)
        child.join(120)
        assert child.exitcode == 137, operations[at - 1]
        began = (folder / "run" / "config.yaml").is_file()
        result = resume(folder / "run") if began else start(config, "tiny")
        assert numbers(result.run_dir) == numbers(folder / "whole"), operations[at - 1]
        assert same_adapters(result.adapter, folder / "whole" / "adapter"), operations[at - 1]
        shutil.rmtree(folder / "run")
