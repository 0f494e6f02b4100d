"""A random adapter for a base."""

import torch

from qerl.checkpoint.adapter import adapter_tensors, attach_lora, save_adapter


def random_adapter(folder, base, train_norms=False, rank=4, seed=0):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = attach_lora(AutoModelForCausalLM.from_pretrained(base), rank, 2 * rank, train_norms=train_norms)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            if ".lora_A." not in name:
                tensor.add_(0.1 * torch.randn(tensor.shape))
    save_adapter(model, folder, str(base))
    return folder
