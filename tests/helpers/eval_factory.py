"""A small model that always answers, its NVFP4 twin, adapters and run directories, for the tests of evaluation.

The head is drawn such that greedy completions consist of the tokens "#### 0" to "#### 9" and the end of sequence.
"""

import json
import shutil

import torch

from qerl.checkpoint.adapter import adapter_tensors, attach_lora, save_adapter
from qerl.config.recipe import load_recipe, save_config
from qerl.formats.nvfp4.reference import quantize

CONTEXT = 256
ANSWERS = [f"\n#### {digit}" for digit in range(10)]
CHARACTERS = [chr(code) for code in range(32, 127)]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def build_model(folder, seed=0):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: index for index, token in enumerate(["<eos>", "<unk>", *ANSWERS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n#### [0-9]|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        eos_token_id=0, bos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[[0, *range(2, 12)]] = torch.randn(11, 32)
    model.save_pretrained(folder)
    return folder


def make_adapter(folder, base, random_b, seed=1):
    """A LoRA adapter with a random A, and B random or zero."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    peft_model = attach_lora(AutoModelForCausalLM.from_pretrained(base), rank=4, alpha=8)
    if random_b:
        for name, tensor in adapter_tensors(peft_model).items():
            if ".lora_B." in name:
                torch.nn.init.normal_(tensor)
    save_adapter(peft_model, folder, str(base))
    return folder


def pack_model(folder, base):
    """Write the NVFP4 twin of `base` in the layout of llm-compressor."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    packed = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if "_proj." not in name:
            packed[name] = tensor
            continue
        codes = quantize(tensor)
        packed |= {f"{name}_packed": codes.packed, f"{name}_scale": codes.block_scale}
        packed[f"{name}_global_scale"] = codes.global_scale
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_run(folder, base, **data):
    """A run directory in the form in which training leaves it."""
    folder.mkdir()
    overrides = [f"model.base={base}", "model.format=bf16", *(f"data.{key}={json.dumps(v)}" for key, v in data.items())]
    save_config(load_recipe("tiny", overrides), folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("")
    make_adapter(folder / "adapter", base, random_b=True)
    return folder
