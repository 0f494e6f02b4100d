"""Small models of each family with our layers, and the same models with the layers of transformers and PEFT."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.checkpoint.adapter import adapter_tensors, attach_lora
from qerl.model import elementwise
from qerl.model.layers import fuse_
from tests.helpers.linear_twins import packed_nvfp4

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
TOKENS = torch.randint(32, (2, 11), generator=torch.Generator().manual_seed(0))


def tiny_model(family, dtype=torch.float32, **changes):
    sizes = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.1, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | changes)), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.requires_grad_(False).eval()


def stock_(policy):
    """Replace our layers in a policy by PEFT's forward and transformers' norms, attention and MLP."""
    from peft.tuners.lora.layer import Linear

    for module in policy.modules():
        module.__dict__.pop("forward", None)
        if isinstance(module, Linear):
            module.lora_part = lambda: None
        if isinstance(module, elementwise.RMSNorm):
            module.forward = lambda x, norm=module: twice_rounded(x, norm.weight, norm.variance_epsilon)
    return policy


def twice_rounded(x, weight, eps):
    """RMSNorm as transformers computes it, rounding twice."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def policy_of(family, pack=False, **arguments):
    model = tiny_model(family, **arguments.pop("changes", {}))
    if pack:
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and "proj" in name:
                model.set_submodule(name, packed_nvfp4(module))
    assert fuse_(model) == 2 * (5 if family != "qwen3" else 7) + 1
    policy = attach_lora(model, **({"rank": 4, "alpha": 6} | arguments))
    torch.manual_seed(2)
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.add_(0.2 * torch.randn_like(tensor))
    return policy.eval()


def difference(value, expected):
    """||value - expected|| / ||expected||."""
    assert expected.norm() > 0
    return ((value.float() - expected).norm() / expected.norm()).item()


def run(policy, tokens=TOKENS, **arguments):
    """The logits, the gradients by name, and the gradient with respect to the embedded input."""
    policy.zero_grad()
    embedded = policy.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = policy(inputs_embeds=embedded, **arguments).logits
    torch.log_softmax(logits.float(), -1)[..., 3].sum().backward()
    grads = {name: tensor.grad.clone() for name, tensor in adapter_tensors(policy).items()}
    return logits.detach(), {**grads, "input": embedded.grad}
