"""The sync of an adapter, norms with noise, scales of keys and values: what acts is right, and each misfit raises."""

from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine.vllm.sync import AdapterSlot, Gains, copy_adapter_, format_of, parts, set_scales_, split_adapter
from qerl.formats.fp8.kv import KVScales

MAX_RANK, HIDDEN, LAYERS = 4, 8, 2
SIZES = {"q_proj": 6, "k_proj": 2, "v_proj": 2}


@pytest.fixture
def slots():
    """Two layers with a fused q/k/v, whose buffers hold other values, as after an earlier sync."""
    found = {}
    for layer in range(LAYERS):
        lora_a = torch.full((3 * MAX_RANK, HIDDEN), 9.0)
        lora_b = torch.full((sum(SIZES.values()), 3 * MAX_RANK), 9.0)
        start = 0
        for index, (leaf, rows) in enumerate(SIZES.items()):
            name = f"model.layers.{layer}.self_attn.{leaf}"
            found[name] = AdapterSlot(lora_a, lora_b, index * MAX_RANK, start, rows)
            start += rows
    for slot in found.values():  # the block-diagonal form that the engine starts from
        outside = [c for c in range(12) if not slot.first <= c < slot.first + MAX_RANK]
        slot.lora_b[slot.row_start : slot.row_start + slot.rows, outside] = 0
    return found


@pytest.fixture
def norms():
    modules = {}
    for name in ("model.layers.0.input_layernorm", "model.layers.1.input_layernorm", "model.norm"):
        modules[name] = torch.nn.Module()
        modules[name].register_buffer("gain", torch.ones(HIDDEN))
    return modules


def adapter(leaves=tuple(SIZES), rank=MAX_RANK):
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(LAYERS):
        for leaf in leaves:
            name = f"model.layers.{layer}.self_attn.{leaf}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(SIZES[leaf], rank, generator=generator)
    return tensors


@pytest.mark.parametrize(
    ("leaves", "rank"), [(("q_proj", "k_proj", "v_proj"), 4), (("q_proj", "v_proj"), 4), (("k_proj",), 3)]
)
def test_the_fused_product_equals_the_products_of_its_parts(slots, norms, leaves, rank):
    tensors = adapter(leaves, rank)
    factors, trained = split_adapter(tensors, slots, norms, MAX_RANK)
    assert trained == {}
    copy_adapter_(factors, slots, scaling=2.0)
    x = torch.randn(5, HIDDEN)
    for name, slot in slots.items():
        got = (x @ slot.lora_a.t() @ slot.lora_b.t())[:, slot.row_start : slot.row_start + slot.rows]
        a, b = tensors.get(f"{name}.lora_A.weight"), tensors.get(f"{name}.lora_B.weight")
        expected = torch.zeros(5, slot.rows) if a is None else 2.0 * (x @ a.t() @ b.t())
        torch.testing.assert_close(got, expected)


def test_trained_norms_are_separated_from_factors(slots, norms):
    weight = torch.full((HIDDEN,), 1.25)
    tensors = {**adapter(), **{f"model.layers.{i}.input_layernorm.weight": weight for i in range(LAYERS)}}
    factors, trained = split_adapter(tensors, slots, norms, MAX_RANK)
    assert len(factors) == 6
    assert set(trained) == {f"model.layers.{i}.input_layernorm" for i in range(LAYERS)}  # not the final norm


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), "only one of A and B"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.1" in name], "nothing for .*layers.1"),
        (lambda t: t.update({name.replace("layers.1", "layers.7"): t[name] for name in t}), "no linear for .*layers.7"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(MAX_RANK, HIDDEN - 1)}), "trained on another base"),
        (lambda t: t.update(adapter(rank=8)), "rank 8, the engine was opened for 4"),
        (lambda t: t.update({f"{FIRST}.weight": torch.ones(HIDDEN)}), "nothing for .*layers.1.input_layernorm"),
    ],
)
def test_tensors_that_do_not_fit_raise(slots, norms, change, message):
    tensors = adapter()
    change(tensors)
    with pytest.raises(EngineError, match=message):
        split_adapter(tensors, slots, norms, MAX_RANK)
    with pytest.raises(EngineError, match="max_rank 0"):  # as an engine without an adapter says
        split_adapter(adapter(), {}, norms, 0)


def test_a_diverged_adapter_leaves_no_trace(slots, norms):
    wide = {name: torch.full_like(tensor, float("nan")) for name, tensor in adapter().items()}
    copy_adapter_(split_adapter(wide, slots, norms, MAX_RANK)[0], slots, scaling=2.0)
    narrow = adapter(("q_proj",), rank=2)
    copy_adapter_(split_adapter(narrow, slots, norms, MAX_RANK)[0], slots, scaling=2.0)
    for slot in slots.values():
        assert (torch.ones(1, HIDDEN) @ slot.lora_a.T @ slot.lora_b.T).isfinite().all()


FIRST, LAST = "model.layers.0.input_layernorm", "model.norm"


@pytest.fixture
def gained():
    """The gain of the last one is 1 + weight, as in Qwen3.5."""
    modules = {}
    for name, value, offset in ((FIRST, 1.5, 0.0), (LAST, -0.5, 1.0)):
        modules[name] = torch.nn.Module()
        modules[name].offset = offset
        modules[name].weight = torch.nn.Parameter(torch.full((4,), value, dtype=torch.bfloat16))
        modules[name].register_buffer("gain", torch.full((4,), float("nan")))
    return modules


def values(gained):
    return {name: norm.gain.tolist() for name, norm in gained.items()}


def test_noise_below_the_grid_of_bfloat16_acts_and_is_removed_without_a_trace(gained):
    gains = Gains(gained)
    gains.set_noise_({FIRST: torch.full((4,), 2.0**-12)})
    assert values(gained) == {FIRST: [1.5 + 2.0**-12] * 4, LAST: [0.5] * 4}
    gains.set_noise_({LAST: torch.full((4,), 2.0**-12)})  # replaces the earlier noise
    assert values(gained) == {FIRST: [1.5] * 4, LAST: [0.5 + 2.0**-12] * 4}
    gains.set_noise_({})
    assert values(gained) == {FIRST: [1.5] * 4, LAST: [0.5] * 4}
    assert gained[FIRST].weight.dtype == torch.bfloat16


def test_trained_weights_keep_the_noise_and_those_of_the_checkpoint_come_back(gained):
    gains = Gains(gained)
    gains.set_noise_({FIRST: torch.full((4,), 0.25)})
    trained = torch.nn.Parameter(torch.full((4,), 1.0 + 2.0**-12))
    gains.set_trained_({FIRST: trained})
    assert values(gained) == {FIRST: [1.25 + 2.0**-12] * 4, LAST: [0.5] * 4}
    with torch.no_grad():
        trained.add_(1.0)  # the optimizer's next step, which acts after the next sync
    gains.set_noise_({FIRST: torch.full((4,), 0.5)})
    assert values(gained)[FIRST] == [1.5 + 2.0**-12] * 4
    gains.set_trained_({FIRST: trained})
    assert values(gained)[FIRST] == [2.5 + 2.0**-12] * 4
    gains.set_trained_({})
    assert values(gained)[FIRST] == [2.0] * 4


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ({"model.layers.9.input_layernorm": torch.zeros(4)}, "does not have: .'model.layers.9.input_layernorm'"),
        ({FIRST: torch.zeros(5)}, r"has shape \(5,\), not \(4,\)"),
    ],
)
def test_noise_that_does_not_fit_is_refused_and_changes_nothing(gained, noise, message):
    gains = Gains(gained)
    gains.set_noise_({FIRST: torch.full((4,), 0.25)})
    with pytest.raises(EngineError, match=message):
        gains.set_noise_({LAST: torch.full((4,), 9.0), **noise})
    gains.set_trained_({})
    assert values(gained) == {FIRST: [1.75] * 4, LAST: [0.5] * 4}


class FlashAttentionImpl:
    pass


class OurImpl(FlashAttentionImpl):
    pass


class FlashInferImpl:
    pass


def layer(impl=OurImpl, query_quant=None):
    scales = {f"_{letter}_scale": torch.tensor(1.0, requires_grad=True) for letter in "qkv"}  # as vLLM leaves them
    on_host = {f"_{letter}_scale_cpu": torch.tensor(1.0) for letter in "kv"}
    return SimpleNamespace(impl=impl(), query_quant=query_quant, **scales, **on_host)


SCALES = {0: KVScales(2.0, 4.0, 0.5), 1: KVScales(8.0, 16.0, 0.25)}


def test_scales_are_written_in_place_and_queries_have_theirs_where_they_are_rounded():
    layers = {0: layer(), 1: layer(query_quant=object())}
    addresses = [one._k_scale.data_ptr() for one in layers.values()]
    assert set_scales_(layers, SCALES) == 2
    assert [one._k_scale.data_ptr() for one in layers.values()] == addresses
    found = [(one._q_scale.item(), one._k_scale.item(), one._v_scale.item()) for one in layers.values()]
    assert found == [(1.0, 4.0, 0.5), (8.0, 16.0, 0.25)]
    assert (layers[1]._k_scale_float, layers[1]._v_scale_cpu.item()) == (16.0, 0.25)


def test_layers_without_scales_and_attention_that_would_not_read_them_are_refused():
    with pytest.raises(EngineError, match="for 2 layers, and 1 have 8-bit ones"):
        set_scales_({0: layer()}, SCALES)
    layers = {0: layer(), 1: layer(FlashInferImpl)}
    with pytest.raises(EngineError, match="attends by FlashInferImpl, whose scales"):
        set_scales_(layers, SCALES)
    assert layers[0]._k_scale == 1  # nothing was written


def fused(*sizes):
    return SimpleNamespace(output_partition_sizes=list(sizes))


def test_a_fused_linear_has_the_rows_of_the_checkpoint_s_linears():
    """vLLM 0.25.1 fuses q, k, v and z of linear attention in four partitions, of which the checkpoint has two linears;
    b comes before a."""
    inside = "model.layers.0.linear_attn"
    found = parts(f"{inside}.in_proj_qkvz", fused(4, 4, 8, 8))
    assert found == [(f"{inside}.in_proj_qkv", 0, 16), (f"{inside}.in_proj_z", 16, 8)]
    found = parts("m.qk_proj", fused(8, 4))  # of Gemma 4, where values are the keys
    assert found == [("m.q_proj", 0, 8), ("m.k_proj", 8, 4)]
    found = parts(f"{inside}.in_proj_ba", fused(2, 2))
    assert found == [(f"{inside}.in_proj_b", 0, 2), (f"{inside}.in_proj_a", 2, 2)]
    assert parts("lm_head", SimpleNamespace(output_size=7)) == [("lm_head", 0, 7)]
    assert [rows for *_, rows in parts("x.qkv_proj", fused(6, 2, 2))] == [6, 2, 2]
    for name, sizes in (("x.in_proj_qkvz", (16, 8)), ("x.qkv_proj", (6, 4)), ("x.o_proj", (6, 4))):
        with pytest.raises(AssertionError, match=r"has 2 partitions"):
            parts(name, fused(*sizes))


def test_a_fused_linear_has_the_format_of_its_parts():
    linears = {"model.layers.0.mlp.gate_proj": "nvfp4", "model.layers.0.mlp.up_proj": "nvfp4", "a.o_proj": "fp8_block"}
    assert format_of("model.layers.0.mlp.gate_up_proj", linears) == "nvfp4"
    assert format_of("a.o_proj", linears) == "fp8_block"
    assert format_of("model.layers.0.self_attn.qkv_proj", linears) is None
    with pytest.raises(EngineError, match=r"different formats in model\.layers\.0\.mlp\.gate_up_proj"):
        format_of("model.layers.0.mlp.gate_up_proj", linears | {"model.layers.0.mlp.up_proj": "fp8_block"})
