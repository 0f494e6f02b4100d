"""The folder qerl/tiny_experts, made by scripts/models/tiny_experts.py: it answers, also packed, by all experts."""

import hashlib
import re

import pytest
import torch
from tiny_checkpoint import accuracy, loss_of
from tiny_experts import BALANCE, build_model

from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.folder import EMBEDDED, TINY_FOLDER
from qerl.checkpoint.load import load_model, load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import read_json
from quantize.run import quantize_checkpoint
from tests.helpers.roundings import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")
TINY_EXPERTS, TINY_EXPERTS_FOLDER = "tiny_experts", EMBEDDED["tiny_experts"]
PROBLEMS = 16


def test_the_card_states_the_hash_and_the_folder_is_small():
    stated = re.search(r"sha256 `([0-9a-f]{64})`", (TINY_EXPERTS_FOLDER / "README.md").read_text())
    assert hashlib.sha256((TINY_EXPERTS_FOLDER / "model.safetensors").read_bytes()).hexdigest() == stated[1]
    assert sum(file.stat().st_size for file in TINY_EXPERTS_FOLDER.iterdir()) < 2_500_000
    assert (TINY_EXPERTS_FOLDER / "tokenizer.json").read_bytes() == (TINY_FOLDER / "tokenizer.json").read_bytes()
    assert resolve_model(TINY_EXPERTS).path == TINY_EXPERTS_FOLDER


def test_packed_it_works_problems_out_and_chooses_every_expert(tmp_path):
    """The card's accuracy is 0.984; three standard deviations for so few problems are 0.1."""
    quantize_checkpoint(TINY_EXPERTS, tmp_path / "packed", ROUNDING)
    model, tokenizer = load_model(tmp_path / "packed", "nvfp4"), load_tokenizer(tmp_path / "packed")
    decoder = decoder_of(read_json(TINY_EXPERTS_FOLDER / "config.json"), TINY_EXPERTS)
    blocks = [layer.mlp for layer in model.model.layers]
    for block in blocks:
        block.recorded = []
    assert accuracy(model, tokenizer, PROBLEMS, style="worked") > 0.85
    for block in blocks:
        ids = torch.cat([each.flatten() for each in block.recorded])
        assert set(ids.tolist()) == set(range(decoder.experts))


def test_the_balancing_loss_is_added_and_reaches_the_routers():
    model, tokenizer = build_model(0), load_tokenizer(TINY_EXPERTS_FOLDER)
    ids = torch.tensor([tokenizer("user\nMia has 4 boxes.")["input_ids"]])
    weights = torch.ones(ids.shape)
    loss = loss_of(model, ids, weights)
    loss.backward()
    model.config.router_aux_loss_coef = 0.0
    plain, aux = loss_of(model, ids, weights), model(input_ids=ids, output_router_logits=True).aux_loss
    assert loss.item() == pytest.approx(plain.item() + BALANCE * aux.item(), rel=1e-5)
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)
