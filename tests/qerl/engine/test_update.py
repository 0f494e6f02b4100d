"""Whole weights reach an engine: it holds the reference's bytes and samples with them; misfits raise."""

from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine.interface import SamplingParams
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.update import AdapterUpdate, WeightsUpdate, deliver, pack_weights_
from qerl.engine.vllm.sync import parts
from qerl.formats.nvfp4 import reference, slab_layout
from qerl.formats.nvfp4.kernel_layout import HUMMING_MMA, MARLIN, QERL, KernelLinear, KernelWeight
from qerl.formats.nvfp4.linear import NVFP4Linear

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]
ON_CPU = EngineOptions(engine="transformers", device="cpu")
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
NORM = "model.layers.0.input_layernorm"


@pytest.fixture
def engine(nvfp4_base):
    return open_engine(str(nvfp4_base), "nvfp4", ON_CPU)


def linears(engine):
    modules = engine.policy_model().named_modules()
    return {name: module for name, module in modules if isinstance(module, torch.nn.Linear) and name != "lm_head"}


def changed(engine, size=0.3, seed=1):
    """The weights of each linear, some of them changed by up to `size` times the largest weight."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, linear in linears(engine).items():
        dense = linear.dense(torch.float32) if isinstance(linear, NVFP4Linear) else linear.weight.detach().float()
        step = torch.randn(dense.shape, generator=generator).clamp(-1, 1) * dense.abs().max()
        weights[name] = (dense + size * step).clamp(-dense.abs().max(), dense.abs().max())
    return weights


def norms_of(engine):
    named = engine.policy_model().named_parameters()
    return {name.removesuffix(".weight"): p for name, p in named if name.endswith("_layernorm.weight")}


def completions(engine):
    return [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]


def test_each_linear_holds_the_bytes_of_the_reference_at_the_same_address(engine):
    before = completions(engine)
    scores = engine.score(PROMPTS, before)
    places = {name: linear.weight_packed.data_ptr() for name, linear in linears(engine).items()}
    weights = changed(engine)
    assert deliver(WeightsUpdate(weights), engine) == len(weights) == 14
    for name, linear in linears(engine).items():
        expected = reference.quantize(weights[name], linear.weight_global_scale)
        assert torch.equal(linear.weight_packed, expected.packed)
        assert torch.equal(linear.weight_scale.view(torch.uint8), expected.block_scale.view(torch.uint8))
        assert linear.weight_packed.data_ptr() == places[name]
    assert engine.score(PROMPTS, before) != scores
    assert completions(engine) != before


def test_the_engine_samples_as_a_model_that_was_loaded_with_the_weights(base):
    """A 16-bit base takes the matrices as they are, together with norms."""
    engine, other = (open_engine(str(base), "bf16", ON_CPU) for _ in range(2))
    weights = changed(engine)
    norms = {name: 1.5 * norm.detach() for name, norm in norms_of(engine).items()}
    assert deliver(WeightsUpdate(weights, norms), engine) == 18
    own = linears(other)
    with torch.no_grad():
        for name, matrix in weights.items():
            own[name].weight.copy_(matrix)
        for name, norm in norms_of(other).items():
            norm.copy_(norms[name])
    assert engine.generate(PROMPTS, GREEDY) == other.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(("part", "count"), [(".mlp.", 6), ("layers.1.", 7), ("layers.0.self_attn.k_proj", 1)])
def test_any_of_the_linears_may_be_trained(engine, part, count):
    weights = {name: matrix for name, matrix in changed(engine).items() if part in name}
    others = {name: module.weight_packed.clone() for name, module in linears(engine).items() if name not in weights}
    assert deliver(WeightsUpdate(weights), engine) == count
    assert all(torch.equal(linears(engine)[name].weight_packed, packed) for name, packed in others.items())


def renamed(weights):
    return {name.replace("layers.1", "layers.7"): matrix for name, matrix in weights.items()}


@pytest.mark.parametrize(
    ("change", "norms", "message"),
    [
        (renamed, {}, r"no linear for .'model\.layers\.7.*7 of 14"),
        (lambda w: w | {"lm_head": torch.zeros(8, 64)}, {}, "no linear for .'lm_head'"),
        (lambda w: w, {"model.layers.9.input_layernorm": torch.ones(64)}, "no norm for"),
        (lambda w: w, {NORM: torch.ones(64)}, r"nothing for .'model\.layers\.1\.input_layernorm"),
        (lambda w: w, {NORM: torch.ones(32), NORM.replace("0", "1"): torch.ones(64)}, r"has shape \(32,\)"),
    ],
    ids=["unknown", "head", "unknown norm", "missing norm", "norm of another size"],
)
def test_names_that_do_not_fit_raise_before_anything_is_written(engine, change, norms, message):
    before = engine.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineError, match=message):
        deliver(WeightsUpdate(change(changed(engine)), norms), engine)
    assert engine.generate(PROMPTS, GREEDY) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda matrix: matrix[:-8], r"and the linear \(64, 64\): the update is of another base"),
        (lambda matrix: 3 * matrix, "block scales of .*q_proj saturate: .* fixed for a run"),
        (lambda matrix: matrix.index_fill(0, torch.tensor(3), float("nan")), "inf or NaN"),
    ],
    ids=["shape", "grown", "not finite"],
)
def test_a_matrix_that_the_linear_cannot_hold_is_refused(engine, change, message):
    weights, name = changed(engine), "model.layers.1.self_attn.q_proj"
    with pytest.raises(EngineError, match=message) as raised:
        deliver(WeightsUpdate({**weights, name: change(weights[name])}), engine)
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)


def test_weights_may_be_computed_when_they_are_read(engine):
    """Each is asked for once, and no two of them have to exist at the same time."""
    weights, reads = changed(engine), []

    class Lazy(dict):
        def __getitem__(self, name):
            reads.append(name)
            return super().__getitem__(name)

    deliver(WeightsUpdate(Lazy(weights)), engine)
    assert reads == list(weights)


@pytest.mark.parametrize(
    "update", [AdapterUpdate({"a": None, "b": None}, 2.0), WeightsUpdate({"a": None}, {"n": None})]
)
def test_an_engine_that_takes_only_a_part_of_the_update_is_detected(update):
    assert len(update) == 2
    assert deliver(update, SimpleNamespace(sync=len)) == 2
    with pytest.raises(EngineError, match="the engine took 1 of the update's 2 tensors"):
        deliver(update, SimpleNamespace(sync=lambda update: 1))


# --- the tensors of the vLLM engine, without vLLM

SIZES = {"q_proj": 328, "k_proj": 40, "v_proj": 40}  # parts begin and end inside of a block of 256 or of 16 rows
COLUMNS = 176


def fused_weight(layout=QERL, seed=0):
    """(dense weight, kernel's weight) of a fused q/k/v, as the layer of vLLM keeps it."""
    dense = torch.randn(sum(SIZES.values()), COLUMNS, generator=torch.Generator().manual_seed(seed))
    packed, scales, global_scale = reference.quantize(dense)
    words, laid = slab_layout.pack(packed, scales)
    return dense, KernelWeight(layout, words, laid, len(dense), COLUMNS, float(global_scale))


def views(weight):
    layer = SimpleNamespace(output_partition_sizes=list(SIZES.values()))
    return {name: KernelLinear(weight, start, rows, None) for name, start, rows in parts("model.a.qkv_proj", layer)}


@pytest.mark.parametrize("order", [1, -1])
def test_packing_the_parts_of_a_fused_linear_in_any_order_equals_packing_the_whole(order):
    _, weight = fused_weight()
    new = fused_weight(seed=1)[0].clamp(-2, 2)
    addresses = weight.words.data_ptr(), weight.scales.data_ptr()
    matrices = [*zip((f"model.a.{leaf}" for leaf in SIZES), new.split(list(SIZES.values())), strict=True)]
    assert pack_weights_(dict(matrices[::order]), views(weight)) == 3
    whole = reference.quantize(new, torch.tensor([weight.global_scale]))
    for tensor, expected in zip((weight.words, weight.scales), slab_layout.pack(*whole[:2]), strict=True):
        assert torch.equal(tensor, expected)
    assert (weight.words.data_ptr(), weight.scales.data_ptr()) == addresses
    decoded = torch.cat([view.dense(torch.float32) for view in views(weight).values()])
    assert torch.equal(decoded, reference.dequantize(*whole, torch.float32))


@pytest.mark.parametrize("layout", [MARLIN, HUMMING_MMA], ids=lambda layout: layout.name)
def test_a_kernel_whose_scales_have_their_own_factor_is_refused(layout):
    dense, weight = fused_weight(layout)
    before = weight.words.clone()
    with pytest.raises(EngineError, match=rf"the {layout.name} kernel .* write rollout\.kernel=qerl"):
        pack_weights_({"model.a.q_proj": dense[:328], "model.a.k_proj": dense[328:368]}, views(weight))
    assert torch.equal(weight.words, before)
