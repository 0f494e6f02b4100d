"""Train the embedded mixture of experts (qerl/tiny_experts) from scratch, like the embedded model, on two CPU cores.

    python scripts/models/tiny_experts.py

It has Qwen3-MoE's layout: eight experts in each layer, of which a token gets two, and layers, attention, tokenizer,
corpus and optimizer of qerl/tiny (scripts/models/tiny_checkpoint.py), so that the two can be compared. A token is
multiplied by as many weights of experts as half of qerl/tiny's MLP has.

1. Muon updates each expert's matrices as one of its own, AdamW the routers.
2. A loss that balances how often experts are chosen is added (arXiv 2101.03961, equation 4), as in Qwen3-MoE. Without
   it a few experts would get all tokens of so small a corpus, and nothing would be left to route.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from tiny_checkpoint import VOCABULARY, begin, build_tokenizer, measured, save, train_
from tiny_tokenizer import SPECIAL
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

log = logging.getLogger("tiny_experts")

EXPERTS, CHOSEN, WIDTH = 8, 2, 64
BALANCE = 0.01  # weight of the balancing loss
CARD = Path(__file__).with_name("tiny_experts_card.md")


def build_model(seed: int) -> Qwen3MoeForCausalLM:
    """The untrained model in float32."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        eos_token_id=SPECIAL.index("<|im_end|>"),
    )
    model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def main() -> None:
    """Train, measure in both formats, save."""
    args = begin(__doc__, "tiny_experts", steps=1200, rows=64, row="problems")
    started = time.monotonic()
    tokenizer, model = build_tokenizer(), build_model(args.seed)
    train_(model, tokenizer, args.steps, args.rows, args.seed)
    minutes = (time.monotonic() - started) / 60
    model = model.to(torch.bfloat16).float().eval()  # measure the rounded values, which are saved
    facts = {"minutes": f"{minutes:.0f}", "torch": torch.__version__, **vars(args), **measured(model, tokenizer)}
    digest = save(model.to(torch.bfloat16), tokenizer, args.out, facts, CARD)
    log.info("%s", {name: value for name, value in facts.items() if name.startswith(("bf16", "nvfp4", "minutes"))})
    log.info("%s holds the model, sha256 %s", args.out, digest)


if __name__ == "__main__":
    main()
