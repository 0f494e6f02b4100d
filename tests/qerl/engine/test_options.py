"""An engine's options as one value: for an adapter, and with the engine that runs here."""

import pytest
import torch

from qerl.base.errors import CheckpointError, ConfigError
from qerl.engine.open import with_chosen_engine
from qerl.engine.options import EngineOptions


def test_an_engine_is_opened_for_the_ranks_and_the_kind_of_an_adapter():
    tensors = {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 64)}
    assert EngineOptions().for_adapter(tensors) == EngineOptions(max_rank=8, experts="none", expert_rank=0)
    experts = "model.layers.0.mlp.experts"
    of_each = {
        f"{experts}.gate_up_proj.lora_A.weight": torch.zeros(128, 2, 64),
        f"{experts}.down_proj.lora_A.weight": torch.zeros(128, 2, 32),
    }
    with pytest.raises(CheckpointError, match="has LoRA on experts alone, and the engine needs one that adapts att"):
        EngineOptions().for_adapter(of_each)
    found = EngineOptions().for_adapter(tensors | of_each)
    assert found == EngineOptions(max_rank=8, experts="per_expert", expert_rank=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("given", "named"),
    [({"memory": 4.0}, "--memory"), ({"cap_gib": 8.0}, "--cap-gib"), ({"kernel": "qerl"}, "--kernel")],
)
def test_an_option_of_vllm_is_refused_where_another_engine_runs(given, named):
    with pytest.raises(ConfigError, match=f"{named} is vllm's, and the engine here is transformers"):
        with_chosen_engine(EngineOptions(**given))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_auto_becomes_the_engine_that_runs_here():
    assert with_chosen_engine(EngineOptions(deterministic=True)) == EngineOptions("transformers", deterministic=True)
