"""Checkpoints that the vllm engine refuses before it loads them, by their headers and global scales."""

import pytest
import torch
from safetensors.torch import save_file

from qerl.base.errors import EngineError
from qerl.engine.vllm.opening import check_folder
from qerl.formats import NVFP4


def write(folder, **linears):
    """Write an NVFP4 checkpoint of one layer; name -> (rows, columns, global scale)."""
    tensors = {}
    for name, (rows, columns, scale) in linears.items():
        module = f"model.layers.0.{name.replace('__', '.')}"
        tensors[f"{module}.weight_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        tensors[f"{module}.weight_scale"] = torch.zeros(rows, columns // 16, dtype=torch.float8_e4m3fn)
        tensors[f"{module}.weight_global_scale"] = torch.tensor([scale])
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_what_qerl_quantize_writes_is_taken(nvfp4_base):
    for kernel in ("qerl", "humming", "marlin"):
        check_folder(nvfp4_base, NVFP4, kernel)


def test_fused_linears_with_different_global_scales_are_named(tmp_path):
    folder = write(
        tmp_path,
        self_attn__q_proj=(64, 64, 3.0),
        self_attn__k_proj=(32, 64, 3.0),
        self_attn__v_proj=(32, 64, 3.5),
        self_attn__o_proj=(64, 64, 9.0),
        mlp__gate_proj=(64, 64, 5.0),
        mlp__up_proj=(64, 64, 5.0),
    )
    with pytest.raises(
        EngineError, match=r"layers\.0\.self_attn\.k_proj, .*q_proj, .*v_proj .*3\.0, 3\.5.* `qerl quantize`"
    ):
        check_folder(folder, NVFP4, "marlin")


@pytest.mark.parametrize("rows", [(12, 12), (20, 12)])
def test_a_shape_that_our_kernel_does_not_support_is_refused_for_that_kernel_only(tmp_path, rows):
    """gate/up are one product with all their rows. Its 24 rows are a multiple of 8, the 12 of down_proj are not."""
    gate, up = rows
    folder = write(tmp_path, mlp__gate_proj=(gate, 64, 5.0), mlp__up_proj=(up, 64, 5.0))
    check_folder(folder, NVFP4, "qerl")
    write(tmp_path, mlp__gate_proj=(gate, 64, 5.0), mlp__up_proj=(up, 64, 5.0), mlp__down_proj=(12, 64, 7.0))
    with pytest.raises(EngineError, match=r"mlp\.down_proj is 12 x 64, .* write rollout\.kernel=humming or marlin"):
        check_folder(folder, NVFP4, "qerl")
    check_folder(folder, NVFP4, "marlin")
