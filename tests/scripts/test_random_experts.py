"""scripts/models/make_random_checkpoint.py makes experts and linear attention as `qerl quantize` would."""

import pytest
from make_random_checkpoint import SHAPES, write

from qerl.checkpoint.shards import read_json
from qerl.plan.sizes import KNOWN, sizes_of
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_tensors import same_tensors
from tests.helpers.roundings import ROUNDING


@pytest.mark.parametrize(
    ("shape", "layers", "linears", "architecture"),
    [
        ("small-qwen3-moe", 1, 4 + 3 * 16, "Qwen3MoeForCausalLM"),
        ("tiny-qwen3.5", 4, 4 + 3 * 3 + 4 * 3, "Qwen3_5ForCausalLM"),
    ],
)
def test_the_packed_one_is_what_quantize_makes_of_its_16_bit_twin(tmp_path, shape, layers, linears, architecture):
    for name in ("bf16", "nvfp4"):
        write(shape, tmp_path / name, name, layers=layers)
    report = quantize_checkpoint(str(tmp_path / "bf16"), tmp_path / "quantized", ROUNDING)
    assert len(report.layers) == linears
    assert same_tensors(tmp_path / "nvfp4", tmp_path / "quantized")
    made, own = (read_json(tmp_path / name / "config.json") for name in ("quantized", "nvfp4"))
    assert own["architectures"] == [architecture]
    assert own["quantization_config"]["ignore"] == made["quantization_config"]["ignore"]


def test_30b_a3b_has_the_shape_that_the_plan_knows():
    shape = SHAPES["qwen3-30b-a3b"]
    assert sizes_of(shape, "shape") == sizes_of({**KNOWN["qwen3-30b-a3b"], "max_position_embeddings": 40960}, "known")
