"""What several files share: a run that they compare theirs with, and a base with a start."""

import shutil

import pytest
import torch

from qerl.checkpoint.base_start import START
from tests.helpers.small_run import small_config
from tests.helpers.starts import give_start_


@pytest.fixture(scope="session")
def whole_run(nvfp4_base, tmp_path_factory):
    """The small run of 6 steps, uninterrupted. Tests copy it before they change it."""
    from training.run import start

    torch.set_num_threads(1)
    return start(small_config(nvfp4_base, tmp_path_factory.mktemp("whole")), "tiny").run_dir


@pytest.fixture(scope="session")
def started_base(base, nvfp4_base, tmp_path_factory):
    """The small NVFP4 base with a start of rank 16."""
    folder = tmp_path_factory.mktemp("started") / "qwen3-NVFP4A16"
    shutil.copytree(nvfp4_base, folder, ignore=shutil.ignore_patterns(START))
    give_start_(folder, base)
    return folder
