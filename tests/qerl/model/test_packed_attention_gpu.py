"""Flash attention over packed rows on a card: its twin, FlashAttention 3 beside the engine, and repeated gradients.

Last run on an H200 on 2026-11-22.
"""

from itertools import pairwise

import pytest
import torch

from qerl.model.packed_attention import attend_each, attend_flash, deterministic_kernels
from qerl.model.packing import Sequences

pytestmark = pytest.mark.gpu


def gpu_inputs(lengths, heads, kv_heads, head_dim):
    """Random (q, k, v) and sequences. Two completions share a prompt of 40 tokens, itself a sequence before them."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    prompt = torch.arange(int(starts[1]), int(starts[1]) + 40)
    own = [torch.arange(int(a), int(b)) for a, b in pairwise(starts.tolist())]
    own = [own[0], prompt, own[1][40:], *own[2:]]
    keys = [own[0], prompt, torch.cat([prompt, own[2]]), torch.cat([prompt, own[3]]), *own[4:]]
    bounds = [torch.tensor([0, *map(len, parts)]).cumsum(0).int().cuda() for parts in (own, keys)]
    gathered = torch.cat(keys).cuda()
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), n, head_dim, device="cuda").bfloat16() for n in (heads, kv_heads, kv_heads))
    sequences = Sequences(*bounds, gathered, max(map(len, own)), max(map(len, keys)))
    return (q, k[gathered], v[gathered]), sequences


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(28, 4, 128), (8, 8, 64), (16, 8, 256)])
def test_flash_attention_agrees_with_its_twin(heads, kv_heads, head_dim, window):
    """Outputs and gradients in bfloat16 equal those of the twin in float32 within bfloat16 rounding of the inputs."""
    qkv, sequences = gpu_inputs([640, 41, 77, 512, 300], heads, kv_heads, head_dim)
    weight = torch.randn(*qkv[0].shape, device="cuda")
    results = []
    for attend, dtype in ((attend_flash, torch.bfloat16), (attend_each, torch.float32)):
        inputs = tuple(tensor.detach().to(dtype).requires_grad_() for tensor in qkv)
        out = attend(inputs, sequences, head_dim**-0.5, window)
        (out.float() * weight).sum().backward()
        results.append([out, *(tensor.grad for tensor in inputs)])
    for fast, exact in zip(*results, strict=True):
        error = (fast.float() - exact.float()).norm() / exact.float().norm()
        assert error < 1e-2


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(28, 4, 128), (8, 8, 64)])
def test_with_the_engine_loaded_flash_attention_3_gives_the_same(heads, kv_heads, head_dim, monkeypatch):
    """On Hopper, with strided inputs as after a fused projection. Its gradient repeats if that is requested."""
    import vllm  # noqa: F401 - flash_attention checks whether it is loaded

    from qerl.engine.vllm import flash

    qkv, sequences = gpu_inputs([640, 41, 77, 512, 300], heads, kv_heads, head_dim)
    wide = torch.randn(len(qkv[0]), heads + 3, head_dim, device="cuda").bfloat16()
    wide[:, :heads] = qkv[0]
    weight = torch.randn(*qkv[0].shape, device="cuda")
    results, calls, forward = {}, [], flash.forward
    monkeypatch.setattr(flash, "forward", lambda *given: calls.append(1) or forward(*given))
    for name, attend, dtype in (
        ("3", attend_flash, torch.bfloat16),
        ("again", attend_flash, torch.bfloat16),
        ("2", attend_flash, torch.bfloat16),
        ("exact", attend_each, torch.float32),
    ):
        if name == "2":
            monkeypatch.setattr(flash, "takes", lambda q: False)
        calls.clear()
        leaves = tuple(tensor.detach().to(dtype).requires_grad_() for tensor in (wide, *qkv[1:]))
        with deterministic_kernels(name != "2"):
            out = attend((leaves[0][:, :heads], *leaves[1:]), sequences, head_dim**-0.5, None)
            assert len(calls) == (name in ("3", "again"))
            (out.float() * weight).sum().backward()
        results[name] = [out.detach().float(), *(leaf.grad.float() for leaf in leaves)]
    errors = {
        name: [((a - b).norm() / b.norm()).item() for a, b in zip(values, results["exact"], strict=True)]
        for name, values in results.items()
    }
    assert all(torch.equal(a, b) for a, b in zip(results["3"], results["again"], strict=True))
    assert all(ours < 1.1 * theirs for ours, theirs in zip(errors["3"], errors["2"], strict=True)), errors
    assert max(errors["2"]) < 1e-2


def test_a_deterministic_gradient_repeats_to_the_bit():
    qkv, sequences = gpu_inputs([1500, 700, 3000, 90], 28, 4, 128)
    gradients = []
    for _ in range(5):
        inputs = tuple(tensor.clone().requires_grad_() for tensor in qkv)
        with deterministic_kernels(True):
            attend_flash(inputs, sequences, 128**-0.5, None).square().sum().backward()
        gradients.append([tensor.grad for tensor in inputs])
    for other in gradients[1:]:
        assert all(torch.equal(one, two) for one, two in zip(gradients[0], other, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()
