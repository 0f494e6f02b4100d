"""A run that several files compare theirs with."""

import pytest
import torch

from tests.helpers.small_run import small_config


@pytest.fixture(scope="session")
def whole_run(nvfp4_base, tmp_path_factory):
    """The small run of 6 steps, uninterrupted. Tests copy it before they change it."""
    from training.run import start

    torch.set_num_threads(1)
    return start(small_config(nvfp4_base, tmp_path_factory.mktemp("whole")), "tiny").run_dir
