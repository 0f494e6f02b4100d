"""A damaged model folder gives one short error that names the file and the remedy; what ends a completion, and the
text of one: all that was written but the tokens that end or pad it."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError
from qerl.checkpoint import load
from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.load import CompletionText, check_chat_template, load_model, load_tokenizer, text_of_engine
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import has_own_head, read_json, read_tensors
from qerl.checkpoint.verify import FailedCheck, check_head
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.vllm.opening import Settings, check_experts_served
from qerl.episodes.endpoint import Chat
from qerl.formats import NVFP4
from qerl.model.experts import ExpertBlock
from qerl.plan.sizes import read_sizes
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.bases import TINY
from tests.helpers.checkpoint_factory import EXPERT_LAYOUTS, make_checkpoint
from tests.helpers.layer_policies import difference
from tests.helpers.model_folders import edited, without_template
from tests.helpers.moe import make_moe, pack_moe
from tests.helpers.roundings import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def damaged(nvfp4_base, tmp_path):
    """A copy of the NVFP4 base whose config.json can be edited: damaged(key=value)."""
    return lambda **changes: edited(shutil.copytree(nvfp4_base, tmp_path / "model"), **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 8}, r"config\.json describes \(model\.embed_tokens\.weight is"),
        ({"model_type": "foo"}, r"cannot be loaded: .*`foo`.*take Qwen2, Qwen3, Qwen3.5, Gemma 4, Llama or Mistral"),
        ({"rms_norm_eps": "a"}, "cannot be loaded: .*rms_norm_eps.* expected float.*; take Qwen2"),
        ({"hidden_act": "nope"}, "cannot be loaded: .*KeyError 'nope'.*; take Qwen2"),
    ],
)
def test_a_config_that_cannot_be_is_refused_with_the_first_difference_or_transformers_reason(damaged, changes, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_model(damaged(**changes), "nvfp4", "float32", "cpu")
    assert "\n" not in str(caught.value)


def test_a_weight_of_whole_numbers_is_refused(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "model")
    edited(folder, lambda tensors: tensors | {EMBEDDINGS: tensors[EMBEDDINGS].view(torch.int16)})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight as I16 without scales"):
        load_model(str(folder), "bf16", "float32", "cpu")


@pytest.mark.parametrize(
    ("changes", "message", "quantizing"),
    [
        ({"num_hidden_layers": 3}, r"model\.layers\.2\..* is missing.* 9 in all", "lacks"),
        ({"num_hidden_layers": 1}, r"no place for model\.layers\.1\..* 9 in all", "model.layers.1"),
        ({"model_type": "qwen2"}, r"q_proj\.bias is missing", None),
        ({"vocab_size": 400}, r"embed_tokens\.weight is \[320, 64\], not \[400, 64\]", None),
    ],
)
def test_weights_of_another_model_than_the_config_are_refused(tmp_path, changes, message, quantizing):
    """transformers would fill missing weights with random numbers, and drop those it has no place for."""
    folder = edited(make_checkpoint(tmp_path / "model", "llama"), **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, "bf16", "float32")
    with pytest.raises(CheckpointError, match=quantizing or message):
        quantize_checkpoint(str(folder), tmp_path / "out", ROUNDING)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", '{"eos_token_id": "2"}', '{"eos_token_id": [2, null]}'])
def test_a_damaged_generation_config_is_named(damaged, text):
    folder = damaged()
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*copy"):
        open_engine(str(folder), "nvfp4", EngineOptions(engine="transformers"))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2, 7)), ({"eos_token_id": 5}, (5,)), ({"eos_token_id": [5, 2]}, (5, 2)), ({"top_k": 3}, (2, 7))],
    ids=["no generation config", "one", "two", "one that names none"],
)
def test_both_engines_stop_at_the_same_tokens(damaged, generation, expected):
    """At the tokenizer's token, and those of the generation config or else of the model config."""
    folder = damaged(eos_token_id=[2, 7])
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    own = load_tokenizer(folder).eos_token_id
    settings = Settings(str(folder), "nvfp4", EngineOptions())
    assert settings.stop_token_ids() == tuple(dict.fromkeys((own, *expected)))
    engine = open_engine(str(folder), "nvfp4", EngineOptions(engine="transformers"))
    assert engine.end_token_ids == settings.stop_token_ids()


def test_scales_of_an_8_bit_kv_cache_are_left_to_the_engine(damaged):
    folder = edited(damaged(), lambda tensors: tensors | {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    assert not any(name.endswith("k_scale") for name in load_model(folder, "nvfp4").state_dict())


SAID = "3 + 4 = 7\n#### 7"


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The embedded tokenizer, which also marks #### as special."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("marked") / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    token = {"id": content["model"]["vocab"]["####"], "content": "####", "special": True}
    switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({**token, **switches})
    path.write_text(json.dumps(content, ensure_ascii=False))
    return load_tokenizer(str(folder))


def test_tokens_that_are_marked_as_special_are_part_of_the_answer(marked):
    ids = marked(SAID, add_special_tokens=False)["input_ids"]
    assert "####" not in marked.decode(ids, skip_special_tokens=True)
    assert CompletionText(marked, ())([*ids, marked.eos_token_id]) == SAID
    assert text_of_engine(marked, SimpleNamespace()).batch([ids, [marked.eos_token_id], []]) == [SAID, "", ""]


def test_every_token_that_ends_a_completion_in_the_engine_is_left_out(marked):
    ids = marked(SAID, add_special_tokens=False)["input_ids"]
    other = marked.convert_tokens_to_ids("<|im_start|>")
    assert text_of_engine(marked, SimpleNamespace(end_token_ids=(other,)))([*ids, other, marked.pad_token_id]) == SAID
    assert CompletionText(marked, ())([*ids, other]) == f"{SAID}<|im_start|>"


def test_a_turn_with_an_environment_keeps_them_too(marked):
    chat = Chat(marked, (), (marked.eos_token_id,))
    ids = [*marked(SAID, add_special_tokens=False)["input_ids"], marked.eos_token_id]
    assert (chat.decode(ids), chat.action(ids).text) == (SAID, SAID)


def test_a_template_may_stand_in_the_config_or_beside_it(tmp_path):
    folder = without_template(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"base has no chat template.*or put a chat_template\.jinja into"):
        check_chat_template(resolve_model(str(folder)))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    check_chat_template(resolve_model(str(folder)))
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": "{{ messages }}"}))
    check_chat_template(resolve_model(str(folder)))
    config.unlink()
    check_chat_template(resolve_model(str(folder)))  # a missing tokenizer is named by who loads it
    check_chat_template(resolve_model("tiny"))


IDS = torch.tensor([[5, 60, 200, 33, 110]])


@pytest.fixture
def model(tmp_path):
    """A model with a head of its own, in one file, whose config says that it is tied."""
    folder = make_checkpoint(tmp_path / "model", "llama", max_shard_size="1GB", rope_theta=1e4)
    return edited(folder, tie_word_embeddings=True)


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
    edited(model, change, tie_word_embeddings=tied)
    assert has_own_head(read_json(model / "config.json"), read_tensors(model)) is own
    sizes = read_sizes(str(model))
    untied = own or tied is False
    assert sizes.tied is not untied
    head = 2 * sizes.vocabulary * sizes.hidden
    whole = read_sizes(str(edited(model, tie_word_embeddings=False))).weights_bytes("bf16")
    assert whole - sizes.weights_bytes("bf16") == (0 if untied else head), "a plan counts it"


def test_16_bits_and_packed_are_read_with_the_head_of_the_file(model, tmp_path):
    plain = load_model(model, "bf16")
    packed = tmp_path / "packed"
    quantize_checkpoint(str(model), packed, QuantizeOptions(method="rtn", calibration="none", start_rank=0))
    assert read_json(packed / "config.json")["tie_word_embeddings"] is False
    check_head(packed)
    for tied in (False, True):  # True: as others, and earlier versions, write it
        opened = load_model(edited(packed, tie_word_embeddings=tied), "nvfp4")
        torch.testing.assert_close(opened(IDS).logits, own_logits(packed, opened))
    assert not plain.config.tie_word_embeddings
    torch.testing.assert_close(plain(IDS).logits, own_logits(model, plain))
    with pytest.raises(FailedCheck, match="ties the head to the embeddings, and the file has a head of its own"):
        check_head(packed)


@pytest.mark.parametrize("to", ["bf16", "nvfp4"])
def test_a_trained_head_is_written_as_an_untied_one(to, model, tmp_path):
    """The base holds its embeddings twice; the adapter changes one of both."""
    from peft import LoraConfig, get_peft_model

    edited(model, lambda found: found | {HEAD: found[EMBEDDINGS].clone()})
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    out = tmp_path / "merged"
    export(ExportOptions(adapter=str(tmp_path / "adapter"), to=to, out=out, model=str(model), prompt_count=0))
    assert read_json(out / "config.json")["tie_word_embeddings"] is False
    opened = load_model(out, to)
    torch.testing.assert_close(opened(IDS).logits, own_logits(out, opened))
    head = load_file(out / "model.safetensors")[HEAD]
    assert not head.equal(load_file(out / "model.safetensors")[EMBEDDINGS])


def test_vllm_is_told_of_it(model):
    assert Settings(str(model), "bf16", EngineOptions()).overrides() == {"tie_word_embeddings": False}
    edited(model, tie_word_embeddings=False)
    assert Settings(str(model), "bf16", EngineOptions()).overrides() == {}


TOKENS = torch.randint(300, (2, 13), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make_moe(tmp_path_factory.mktemp("moe") / "moe")


@pytest.fixture(scope="module")
def packed(moe, tmp_path_factory):
    return pack_moe(moe, tmp_path_factory.mktemp("packed"))


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_16_bit_and_packed_models_compute_what_transformers_does(tmp_path, layout):
    source = make_checkpoint(tmp_path / "source", layout, max_shard_size="1GB")
    folder, twin = pack_moe(source, tmp_path)
    for opened, format, weights in ((source, "bf16", source), (folder, "nvfp4", twin)):
        ours = load_model(opened, format)
        theirs = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        assert sum(isinstance(module, ExpertBlock) for module in ours.modules()) == 2
        held = ours.model.layers[1].mlp.experts.gate_up_proj
        assert held.tensor_names[0] == ("weight" if format == "bf16" else "weight_packed")
        assert difference(logits(ours), logits(theirs)) < 1e-5


def test_a_layer_may_have_a_dense_mlp(tmp_path):
    folder = make_moe(tmp_path / "moe", mlp_only_layers=[0])
    ours, theirs = load_model(folder, "bf16"), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert [isinstance(layer.mlp, ExpertBlock) for layer in ours.model.layers] == [False, True]
    assert ours.model.layers[1].mlp.place == 0
    assert difference(logits(ours), logits(theirs)) < 1e-5


EXPERT = "model.layers.1.mlp.experts.2.down_proj"
CUT = r"expert 2 has weight as torch.bfloat16 \[64, 1\], and config.json says torch.float32 \[64, 48\]"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda matrix: {}, {}, f"lacks experts .*{EXPERT}.weight; 1 tensors in all"),
        (lambda matrix: {EXPERT: matrix}, {"num_experts": 5}, "lacks experts .*; 6 tensors in all"),
        (lambda matrix: {EXPERT: matrix}, {"num_experts": 3}, "6 tensors in all"),
        (lambda matrix: {EXPERT: matrix[:, :1].contiguous()}, {}, CUT),
    ],
)
def test_experts_that_do_not_fit_the_config_are_refused(moe, tmp_path, change, config, message):
    def changed(tensors):
        return tensors | {f"{name}.weight": each for name, each in change(tensors.pop(f"{EXPERT}.weight")).items()}

    folder = edited(shutil.copytree(moe, tmp_path / "changed"), changed, **config)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, "bf16")


def test_vllm_refuses_a_family_that_its_plugin_does_not_know(tmp_path):
    decoder = decoder_of(read_json(make_checkpoint(tmp_path / "olmoe", "olmoe") / "config.json"), "m")
    with pytest.raises(CheckpointError, match=r"OLMoE, and qerl serves Qwen3-MoE with vLLM: .*engine: transformers"):
        check_experts_served(tmp_path / "olmoe", NVFP4, decoder)


def test_experts_in_8_bits_or_with_rounded_activations_are_refused(moe, packed, tmp_path):
    """Folders packed by the formats' own arithmetic, as others may publish them."""
    eight, _ = pack_moe(moe, tmp_path, "fp8_block")
    rounds = shutil.copytree(packed[0], tmp_path / "rounds")
    edited(rounds, quantization_config=NVFP4.quantization_config(["lm_head"], "dynamic"))
    for folder, what in ((eight, "FP8, and"), (rounds, "NVFP4, with rounded activations, and")):
        with pytest.raises(CheckpointError, match=f"{folder} is a mixture of experts in {what} qerl has experts in"):
            resolve_model(str(folder))


def test_frequencies_that_a_model_computes_are_not_missing(base, monkeypatch):
    """Code of a model's own may keep them as a buffer that is saved."""
    original = load.empty_model

    def with_frequencies(*given):
        model = original(*given)
        rotary = model.model.rotary_emb
        rotary.register_buffer("inv_freq", rotary.inv_freq, persistent=True)
        return model

    monkeypatch.setattr(load, "empty_model", with_frequencies)
    load.check_config_fits(base, read_tensors(base))
