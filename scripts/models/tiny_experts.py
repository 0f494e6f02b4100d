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

import torch
from tiny_checkpoint import SHAPE, begin, make, sampling
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS, CHOSEN, WIDTH = 8, 2, 64
BALANCE = 0.01  # weight of the balancing loss
OF_CARD = {
    "title": "tiny experts",
    "model": "mixture of experts",
    "layout": "Qwen3-MoE layout (8 experts in each layer, 2 for each token; ",
    "script": "tiny_experts",
    "kept": "head and routers",
}


def build_model(seed: int) -> Qwen3MoeForCausalLM:
    """The untrained model in float32."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **SHAPE,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
    )
    return sampling(Qwen3MoeForCausalLM(config))


if __name__ == "__main__":
    make(begin(__doc__, "tiny_experts", steps=1200, rows=64, row="problems"), build_model, OF_CARD)
