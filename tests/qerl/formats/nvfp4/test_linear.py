"""The packed linear against its dense twin, a torch.nn.Linear with the dequantized weight, also in a model under PEFT.

Experts in Marlin's layout decode to the bits of their checkpoint; a card reads the same bits (last run on an H200 on
2026-11-23).
"""

import copy
import os
import pickle
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qerl.base.errors import CheckpointError, QerlError
from qerl.formats import NVFP4
from qerl.formats.linear import cached_weights, swap_linears
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.kernel_layout import expected_shapes, marlin_takes
from qerl.formats.nvfp4.linear import NVFP4Linear
from tests.helpers.linear_twins import IN, OUT, assert_same_bits, buffers, output_and_gradient, packed_and_twin
from tests.helpers.marlin import marlin_experts

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (7, IN), (2, 5, IN), (2, 3, 4, IN)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradient_equal_the_dense_twin(dtype, bias, shape, autocast):
    packed, twin = packed_and_twin(dtype, bias)
    x = torch.randn(shape).to(dtype)
    for module in (packed, twin):
        with pytest.raises(RuntimeError, match="dtype"):
            module(x.half())
    ours, theirs = (output_and_gradient(module, x, autocast) for module in (packed, twin))
    assert (ours[0].dtype, ours[1].dtype) == (torch.bfloat16 if autocast else dtype, dtype)
    for value, expected in zip(ours, theirs, strict=True):
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_checkpointing_equals_the_dense_twin(autocast):
    pairs = [packed_and_twin(sizes=sizes) for sizes in ((IN, OUT), (OUT, IN))]
    x = torch.randn(3, IN)
    ours, theirs = (
        output_and_gradient(nn.Sequential(first, nn.SiLU(), second), x, autocast, checkpointed=True)
        for first, second in zip(*pairs, strict=True)
    )
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_equals_the_dense_twin(mode):
    packed, twin = packed_and_twin()
    x = torch.randn(4, IN)
    with mode():
        assert torch.equal(packed(x), twin(x))
    # The byte table made in inference mode must not break a training step afterwards.
    assert torch.equal(output_and_gradient(packed, x)[1], output_and_gradient(twin, x)[1])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_trained_bias_gets_the_twins_gradient(autocast):
    packed, twin = packed_and_twin()
    x = torch.randn(2, 3, IN)
    for module in (packed, twin):
        module.bias.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(x).square().sum().backward()
    assert packed.bias.grad.dtype == torch.float32
    assert torch.equal(packed.bias.grad, twin.bias.grad)


def test_everything_is_frozen_and_no_dense_weight_is_stored():
    packed, _ = packed_and_twin()
    assert not any(parameter.requires_grad for parameter in packed.parameters())
    stored = sum(tensor.nbytes for tensor in packed.state_dict().values())
    assert stored == OUT * IN // 2 + OUT * IN // 16 + 4 + 4 * OUT


def test_between_forward_and_backward_no_dense_weight_is_alive(monkeypatch):
    packed, _ = packed_and_twin()
    dense, saved, dequantize = [], [], reference.dequantize_unchecked

    def watched(*args):
        weight = dequantize(*args)
        dense.append(weakref.ref(weight))  # the reference lives as long as anything in torch holds the tensor
        return weight

    monkeypatch.setattr(reference, "dequantize_unchecked", watched)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = packed(torch.randn(3, IN, requires_grad=True))
    assert (len(dense), dense[0](), saved) == (1, None, [])
    y.sum().backward()
    assert (len(dense), dense[1]()) == (2, None)


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.to("cpu", torch.float16), torch.float16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16().float(), torch.float32),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("cpu"), torch.float32),
        (lambda m: m.type(torch.bfloat16), torch.bfloat16),
    ],
)
def test_casting_keeps_the_bits_and_changes_the_compute_dtype(cast, dtype):
    packed, twin = packed_and_twin()
    before = copy.deepcopy(packed)
    holder = cast(nn.Sequential(packed))
    assert_same_bits(holder[0], before)
    assert (packed.compute_dtype, packed.bias.dtype, packed.weight.dtype) == (dtype, dtype, dtype)
    cast(nn.Sequential(twin))  # this casts the bias
    twin.weight.data = reference.dequantize(*buffers(before).values(), dtype)
    x = torch.randn(3, IN).to(dtype)
    assert torch.equal(packed(x), twin(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_is_filled_by_a_saved_state(bias, assign, tmp_path):
    packed, twin = packed_and_twin(torch.bfloat16, bias)
    save_file(packed.state_dict(), tmp_path / "linear.safetensors")
    other = packed_and_twin(torch.bfloat16, bias, seed=2)[0]
    other = NVFP4Linear(IN, OUT, bias=bias, device="meta", dtype=torch.bfloat16) if assign else other
    other.load_state_dict(load_file(tmp_path / "linear.safetensors"), assign=assign)
    assert_same_bits(other, packed)
    x = torch.randn(3, IN).bfloat16()
    assert torch.equal(other(x), twin(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("weight_scale", torch.ones(OUT, IN // 16), "must be F8_E4M3"),
        ("weight_packed", torch.zeros(OUT, IN // 2), "must be U8"),
        ("weight_packed", torch.zeros(OUT, IN // 4, dtype=torch.uint8), r"\(48, 40\)"),
        ("weight_global_scale", torch.tensor(1.0), r"\(1,\)"),
        ("weight_global_scale", torch.zeros(1), "finite and positive"),
        ("weight_scale", torch.full((OUT, IN // 16), float("nan")).to(torch.float8_e4m3fn), "are NaN"),
    ],
)
def test_tensors_that_do_not_fit_raise_and_are_not_cast(name, wrong, message, assign):
    packed, _ = packed_and_twin()
    with pytest.raises(RuntimeError, match=message):
        packed.load_state_dict({**packed.state_dict(), name: wrong}, assign=assign)
    with pytest.raises(CheckpointError):
        NVFP4Linear.from_tensors(*{**buffers(packed), name: wrong}.values())
    with pytest.raises(CheckpointError, match="bias"):
        NVFP4Linear.from_tensors(*buffers(packed).values(), bias=torch.zeros(OUT + 1))
    with pytest.raises(CheckpointError, match="multiple of 16"):
        NVFP4Linear(24, 8)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_computes_the_same_and_shares_nothing(copied):
    packed, twin = packed_and_twin(torch.bfloat16)
    with cached_weights(packed):
        packed(torch.randn(1, IN).bfloat16())
        other = copied(packed)
    assert_same_bits(other, packed)
    packed.weight_packed.zero_()
    x = torch.randn(3, IN).bfloat16()
    assert torch.equal(other(x), twin(x))
    assert other.compute_dtype == torch.bfloat16


def test_from_tensors_holds_the_given_tensors():
    packed, twin = packed_and_twin()
    other = NVFP4Linear.from_tensors(*buffers(packed).values(), bias=packed.bias, compute_dtype=torch.bfloat16)
    assert other.weight_packed.data_ptr() == packed.weight_packed.data_ptr()
    assert (other.in_features, other.out_features, other.bias.dtype) == (IN, OUT, torch.bfloat16)
    x = torch.randn(2, IN).bfloat16()
    assert torch.equal(other(x), twin.bfloat16()(x))


def test_weight_has_the_twins_shape_and_values_without_storage():
    packed, twin = packed_and_twin(torch.bfloat16)
    weight = packed.weight
    assert (weight.shape, weight.dtype, weight.device) == (twin.weight.shape, twin.weight.dtype, twin.weight.device)
    assert torch.equal(torch.zeros(OUT, IN).copy_(weight), twin.weight.float())
    assert torch.equal(weight.detach().float().norm(), twin.weight.float().norm())
    assert torch.equal(nn.functional.linear(torch.eye(IN).bfloat16(), weight), twin.weight.T)
    assert "weight" not in dict(packed.named_parameters())
    assert weight.data_ptr() == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda linear: setattr(linear.weight, "data", linear.weight.data.add_(1.0)),
        lambda linear: setattr(linear.weight, "data", torch.zeros(OUT, IN)),
        lambda linear: linear.weight.add_(1),
        lambda linear: nn.init.normal_(linear.weight),
        lambda linear: torch.add(torch.ones(OUT, IN), 1, out=linear.weight),
        lambda linear: linear.reset_parameters(),
    ],
)
def test_writing_to_the_weight_raises(write):
    packed, _ = packed_and_twin()
    before = copy.deepcopy(packed)
    with pytest.raises(QerlError):
        write(packed)
    assert_same_bits(packed, before)


@pytest.fixture
def calls(monkeypatch):
    """The dtype of each weight that is dequantized."""
    seen, dequantize = [], reference.dequantize_unchecked
    monkeypatch.setattr(reference, "dequantize_unchecked", lambda *given: seen.append(given[-1]) or dequantize(*given))
    return seen


def test_forward_and_backward_dequantize_once_each_and_with_the_cache_once_in_all(calls):
    packed, twin = packed_and_twin(torch.bfloat16)
    calls.clear()
    x = torch.randn(2, IN).bfloat16()
    expected = output_and_gradient(twin, x)[1]
    assert torch.equal(output_and_gradient(packed, x)[1], expected)
    assert calls == [torch.bfloat16] * 2
    with cached_weights(nn.Sequential(packed)) as cache:
        for _ in range(3):
            with torch.inference_mode():
                assert torch.equal(packed(x), twin(x))
        assert torch.equal(output_and_gradient(packed, x)[1], expected)  # after inference mode
        assert (len(calls), cache.bytes) == (3, 2 * IN * OUT)
    with pytest.raises(RuntimeError, match="shapes"), cached_weights(packed):
        packed(torch.randn(1, IN + 1).bfloat16())
    calls.clear()
    packed(x)
    assert len(calls) == 1  # it is freed, also where the block raises


def test_the_cache_stays_within_its_bound(calls):
    model = nn.Sequential(*(packed_and_twin(sizes=(64, 64), seed=seed)[0] for seed in range(3)))
    x = torch.randn(2, 64)
    expected = model(x)
    calls.clear()
    with cached_weights(model, max_bytes=2 * 4 * 64 * 64 + 100) as cache:
        for _ in range(2):
            assert torch.equal(model(x), expected)
    assert cache.bytes == 2 * 4 * 64 * 64
    assert len(calls) == 3 + 1


def test_the_cache_follows_loading_and_casting():
    packed, _ = packed_and_twin(seed=1)
    other, twin = packed_and_twin(seed=2)
    x = torch.randn(2, IN)
    with cached_weights(packed) as cache:
        packed(x)
        packed.load_state_dict(other.state_dict())
        assert torch.equal(packed(x), twin(x))
        packed.bfloat16()
        assert torch.equal(packed(x.bfloat16()), twin.bfloat16()(x.bfloat16()))
        assert cache.bytes == 2 * IN * OUT


def tiny_model(dtype=torch.float32):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=64, tie_word_embeddings=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers initializes them to zero
            nn.init.normal_(parameter)
    return model.to(dtype).requires_grad_(False).eval()


def packed_model_and_twin(dtype=torch.float32):
    """A tiny Qwen2 whose projections are packed, filled from a saved state, and its dense twin."""
    twin = tiny_model(dtype)
    names = [name for name, module in twin.named_modules() if name.endswith("_proj")]
    state = dict(twin.state_dict())
    for name in names:
        tensors = reference.quantize(state.pop(f"{name}.weight"))
        state.update({f"{name}.{key}": tensor for key, tensor in tensors.named().items()})
        twin.get_submodule(name).weight.copy_(reference.dequantize(*tensors, dtype))
    model = tiny_model(dtype)
    assert swap_linears(model, names, NVFP4) == len(names) == 14
    model.load_state_dict(state)
    return model, twin


def test_a_swapped_model_generates_the_same_as_its_twin():
    model, twin = packed_model_and_twin()
    prompt = torch.randint(0, 64, (2, 5))
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with cached_weights(model) as cache:
        cached = model.generate(prompt, **settings)
        assert cache.bytes == 4 * sum(module.weight.numel() for name, module in twin.named_modules() if "_proj" in name)
    assert torch.equal(cached, twin.generate(prompt, **settings))
    assert torch.equal(model.generate(prompt, **settings), cached)
    assert torch.equal(model(prompt).logits, twin(prompt).logits)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no quantized linear"),
        (["model.layers.9.mlp.up_proj"], "NoneType"),
        (["model.norm"], "Qwen2RMSNorm"),
        (["model.layers.0.mlp.up_proj", "model.layers.0.mlp"], "Qwen2MLP"),
        (["odd"], r"^odd: a weight of shape \(8, 24\)"),
    ],
)
def test_swapping_a_missing_linear_raises_and_changes_nothing(names, message):
    model = tiny_model()
    model.odd = nn.Linear(24, 8)
    with pytest.raises(CheckpointError, match=message):
        swap_linears(model, names, NVFP4)
    assert not any(isinstance(module, NVFP4Linear) for module in model.modules())


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_as_on_the_twin(dtype, checkpointing):
    tokens = torch.randint(0, 64, (2, 9))
    gradients = []
    for model in map(with_lora, packed_model_and_twin(dtype)):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    ours, theirs = gradients
    assert len(ours) == 20
    assert all(tensor.dtype == dtype for tensor in ours.values())  # PEFT takes the compute dtype of the base
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("safe_merge", [False, True])
def test_peft_cannot_merge_into_the_packed_weight(safe_merge):
    model = with_lora(packed_model_and_twin()[0])
    before = copy.deepcopy(model)
    with pytest.raises(QerlError, match="qerl merge"):
        model.merge_adapter(safe_merge=safe_merge)
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        if isinstance(ours, NVFP4Linear):
            assert_same_bits(ours, theirs)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPE = (3, 128, 64)


@pytest.fixture(scope="module")
def experts_and_decoded():
    """Three experts whose weights differ by orders of magnitude, and so do their global scales."""
    size = torch.tensor([1.0, 0.01, 37.0])[:, None, None]
    matrices = size * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return marlin_experts(matrices, spread=1.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_expert_decodes_with_its_own_global_scale(experts_and_decoded, dtype):
    experts, decoded = experts_and_decoded
    assert len(set(experts.global_scale.tolist())) == 3
    assert torch.equal(experts.dense(dtype), decoded.to(dtype))
    assert tuple(map(tuple, (experts.words.shape, experts.scales.shape))) == expected_shapes(SHAPE)


def test_casting_and_moving_leave_the_engines_tensors_alone(experts_and_decoded):
    experts, _ = experts_and_decoded
    words = experts.words
    experts.float().to("meta")
    assert experts.words is words
    assert experts.compute_dtype == torch.bfloat16


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float32], ids=str)
def test_a_card_decodes_the_same_bits(experts_and_decoded, dtype):
    """With `TRITON_INTERPRET=1 pytest -m gpu` it runs on a CPU."""
    from qerl.formats.nvfp4.kernel_layout import KernelExperts
    from qerl.formats.nvfp4.kernels import dequantize_experts_

    experts, decoded = experts_and_decoded
    there = (each.to(DEVICE) for each in (experts.words, experts.scales))
    moved = KernelExperts(*there, SHAPE, experts.global_scale.to(DEVICE), experts.scale_factor)
    out = dequantize_experts_(torch.empty(SHAPE, dtype=dtype, device=DEVICE), moved)
    assert torch.equal(out.cpu(), decoded.to(dtype))


@pytest.mark.parametrize(
    ("hidden", "width", "fits"),
    [(2048, 768, True), (128, 64, True), (64, 128, True), (64, 64, False), (128, 96, False), (96, 128, False)],
)
def test_the_sizes_that_marlin_takes_without_padding(hidden, width, fits):
    assert marlin_takes(hidden, width) is fits
