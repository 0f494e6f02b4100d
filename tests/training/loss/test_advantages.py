"""A group with equal rewards has exactly the advantage 0, where TRL leaves the rounding of a float32 mean."""

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.small_run import small_config
from training.loss.groups import rewards_differ
from training.run import start
from training.run_dir.log import read_metrics

CONSTANT = "def constant(completions, **columns):\n    return [0.7] * len(completions)\n"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.7] * 8, False),
        ([0.3, 0.3 + 6e-8], False),  # sums of weighted rewards may differ by this
        ([1e4 + 1e-3, 1e4], False),
        ([0.0, 0.0], False),
        ([0.7, 0.70001], True),
        ([0.0, 1e-5], True),
        ([-1.0, 1.0], True),
    ],
)
def test_rounding_is_told_from_a_real_difference(rewards, expected):
    assert rewards_differ(torch.tensor([rewards])).tolist() == [expected]


def test_equal_rewards_do_not_train(nvfp4_base, tmp_path):
    """The float32 mean of eight rewards of 0.7 is not 0.7, and Adam turns any gradient into a full step."""
    (tmp_path / "constant.py").write_text(CONSTANT)
    config = small_config(
        nvfp4_base, tmp_path, "rollout.group_size=8", "loss.advantage_scale=batch", "noise.enabled=false",
        f"rewards=[{{name: '{tmp_path}/constant.py:constant'}}]", steps=1,
    )  # fmt: skip
    start(config, "tiny")
    tensors = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert max(tensor.abs().max() for name, tensor in tensors.items() if "lora_B" in name) == 0
    (row,) = read_metrics(tmp_path / "run")
    assert (row["groups/zero_variance_share"], row["grad_norm"]) == (1, 0)
