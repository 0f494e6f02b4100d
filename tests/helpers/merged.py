"""A random adapter for a base."""

import torch

from qerl.checkpoint.adapter import adapter_tensors, attach_lora, save_adapter
from qerl.checkpoint.adapter_file import attach_to_experts_
from qerl.checkpoint.load import load_model
from qerl.config.names import PROJECTIONS


def random_expert_adapter(folder, base, kind="shared", expert_rank=4, rank=4):
    """An adapter on attention and experts of a mixture of experts."""
    torch.manual_seed(0)
    model = attach_lora(load_model(base, "bf16"), rank, 2 * rank, ("q_proj", "k_proj", "v_proj", "o_proj"))
    attach_to_experts_(model, kind, expert_rank, 2.0)
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.add_(0.05 * torch.randn(tensor.shape))
    save_adapter(model, folder, str(base))
    return folder


def random_adapter(folder, base, train_norms=False, rank=4, seed=0, targets=PROJECTIONS):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = attach_lora(model, rank, 2 * rank, targets, train_norms=train_norms)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            if ".lora_A." not in name:
                tensor.add_(0.1 * torch.randn(tensor.shape))
    save_adapter(model, folder, str(base))
    return folder
