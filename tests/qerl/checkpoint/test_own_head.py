"""A head in the file that differs from the embeddings counts, whatever config.json says, where qerl opens or writes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.checkpoint.load import load_model
from qerl.checkpoint.shards import has_own_head, read_json, read_tensors
from qerl.checkpoint.verify import FailedCheck, check_head
from qerl.engine.options import EngineOptions
from qerl.engine.vllm.opening import Settings
from qerl.plan.sizes import read_sizes
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = torch.tensor([[5, 60, 200, 33, 110]])


def set_tied(folder, value):
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": value}))
    return folder


@pytest.fixture
def model(tmp_path):
    """A model with a head of its own, in one file, whose config says that it is tied."""
    folder = make_checkpoint(tmp_path / "model", "llama", max_shard_size="1GB", rope_theta=1e4)
    return set_tied(folder, True)


def with_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


def own_logits(folder, model):
    """Logits by the head that is in the file."""
    with torch.no_grad():
        return model.model(IDS).last_hidden_state @ load_file(folder / "model.safetensors")[HEAD].float().T


@pytest.mark.parametrize(
    ("tied", "change", "own"),
    [
        (True, lambda found: found, True),
        (None, lambda found: found, True),
        (False, lambda found: found, False),
        (True, lambda found: found | {HEAD: found[EMBEDDINGS].clone()}, False),
        (True, lambda found: found | {HEAD: found[EMBEDDINGS].float()}, False),
        (True, lambda found: {name: tensor for name, tensor in found.items() if name != HEAD}, False),
        (True, lambda found: found | {HEAD: torch.cat([found[EMBEDDINGS][:-1], found[HEAD][-1:]])}, True),
    ],
)
def test_a_head_is_its_own_if_it_differs(tied, change, own, model):
    set_tied(with_tensors(model, change), tied)
    assert has_own_head(read_json(model / "config.json"), read_tensors(model)) is own
    sizes = read_sizes(str(model))
    untied = own or tied is False
    assert sizes.tied is not untied
    head = 2 * sizes.vocabulary * sizes.hidden
    whole = read_sizes(str(set_tied(model, False))).weights_bytes("bf16")
    assert whole - sizes.weights_bytes("bf16") == (0 if untied else head), "a plan counts it"


def test_16_bits_and_packed_are_read_with_the_head_of_the_file(model, tmp_path):
    plain = load_model(model, "bf16")
    packed = tmp_path / "packed"
    quantize_checkpoint(str(model), packed, QuantizeOptions(method="rtn", calibration="none", start_rank=0))
    assert read_json(packed / "config.json")["tie_word_embeddings"] is False
    check_head(packed)
    for tied in (False, True):  # True: as others, and earlier versions, write it
        opened = load_model(set_tied(packed, tied), "nvfp4")
        torch.testing.assert_close(opened(IDS).logits, own_logits(packed, opened))
    assert not plain.config.tie_word_embeddings
    torch.testing.assert_close(plain(IDS).logits, own_logits(model, plain))
    with pytest.raises(FailedCheck, match="ties the head to the embeddings, and the file has a head of its own"):
        check_head(packed)


@pytest.mark.parametrize("to", ["bf16", "nvfp4"])
def test_a_trained_head_is_written_as_an_untied_one(to, model, tmp_path):
    """The base holds its embeddings twice; the adapter changes one of both."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with_tensors(model, lambda found: found | {HEAD: found[EMBEDDINGS].clone()})
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained = get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    )
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    out = tmp_path / "merged"
    export(ExportOptions(adapter=str(tmp_path / "adapter"), to=to, out=out, model=str(model), prompt_count=0))
    assert read_json(out / "config.json")["tie_word_embeddings"] is False
    opened = load_model(out, to)
    torch.testing.assert_close(opened(IDS).logits, own_logits(out, opened))
    head = load_file(out / "model.safetensors")[HEAD]
    assert not head.equal(load_file(out / "model.safetensors")[EMBEDDINGS])


def test_vllm_is_told_of_it(model):
    assert Settings(str(model), "bf16", EngineOptions()).overrides() == {"tie_word_embeddings": False}
    assert Settings(str(set_tied(model, False)), "bf16", EngineOptions()).overrides() == {}
