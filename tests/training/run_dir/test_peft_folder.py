"""The adapter of a run opens in plain PEFT: the lines of its README.md run as they stand."""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.base_start import START, BaseStart, TrainedStart, digest_of, read_start, start_of_adapter
from qerl.checkpoint.folder import CHECKSUMS, REPORT, TINY_FOLDER, seal
from qerl.checkpoint.peft_folder import TrainedOn, add_tokenizer_, card_text, plain_base
from qerl.checkpoint.resolve import resolve_model
from qerl.engine.open import open_model
from qerl.engine.options import EngineOptions
from quantize.export.options import ExportOptions
from quantize.export.run import export
from tests.helpers.small_run import small_config
from tests.helpers.starts import decoded_weights
from training.run import resume, start
from training.run_dir.result import settle_best, settle_result
from training.run_dir.verdict import Best

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(nvfp4_base, tmp_path_factory):
    """A folder with a finished run `runs/mine`."""
    folder = tmp_path_factory.mktemp("peft")
    start(small_config(nvfp4_base, folder, "noise.enabled=false", steps=1, out="runs/mine"), "tiny")
    return folder


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_lines_of_the_card_run_as_they_stand(folder, base, nvfp4_base, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    card = (folder / "runs/mine/adapter/README.md").read_text(encoding="utf-8")
    plain, exact = blocks(card)
    assert "AutoPeftModelForCausalLM" in plain
    models = []
    for block in (plain, exact):
        names = {}
        exec(compile(block, "README.md", "exec"), names)
        models.append(names["model"])
        assert capsys.readouterr().out
        assert len(names["tokenizer"]) > 600
    weights = [model.get_submodule("base_model.model.model.layers.0.mlp.up_proj").base_layer.weight for model in models]
    assert not torch.equal(*weights)
    assert weights[0].dtype == weights[1].dtype == torch.bfloat16
    assert str(base) in card
    assert str(nvfp4_base) in card


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def odd_base(base, tmp_path):
    """A base `models/base` in the current folder whose tokenizer's files are not as transformers 5 would save them."""
    folder = shutil.copytree(base, tmp_path / "models" / "base")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "right"}
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=3))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    return folder


def test_an_adapter_has_the_tokenizer_files_of_its_base_and_names_it_by_its_full_path(odd_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ("noise.enabled=false", "model.format=bf16")
    run = start(small_config("models/base", tmp_path, *settings, steps=1, out="run"), "tiny")
    export(ExportOptions(adapter="run", to="adapter", out=tmp_path / "merged"))
    of_checkpoint = json.loads((tmp_path / "run/checkpoints/step-000001/adapter_config.json").read_text())
    assert of_checkpoint["base_model_name_or_path"] == str(odd_base)
    for folder in (run.adapter, tmp_path / "merged"):
        for name in (*TOKENIZER, "special_tokens_map.json"):
            assert (folder / name).read_bytes() == (odd_base / name).read_bytes(), name
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(odd_base)
    monkeypatch.chdir(tmp_path / "merged")  # from where no folder models/base can be seen
    assert resolve_model(str(tmp_path / "run/adapter")).base == str(odd_base)
    (odd_base / "tokenizer_config.json").unlink()  # without the class's name, files are saved anew
    (tmp_path / "adapter").mkdir()
    add_tokenizer_(tmp_path / "adapter", str(odd_base))
    assert json.loads((tmp_path / "adapter/tokenizer_config.json").read_text())["tokenizer_class"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "adapter")) > 600


def test_peft_is_named_the_16_bit_model_and_qerl_takes_the_base_that_was_trained_on(folder, base, nvfp4_base):
    run = folder / "runs/mine"
    assert json.loads((run / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    for place in (run, run / "adapter", run / "checkpoints/step-000001"):  # the last has no trained_on.json
        found = resolve_model(str(place))
        assert (found.base, found.format) == (str(nvfp4_base), "nvfp4")
    assert resume(run).adapter == run / "adapter"


def test_where_the_base_is_not_here_its_16_bit_model_is_asked_for_in_its_format(folder, base, tmp_path, monkeypatch):
    adapter = shutil.copytree(folder / "runs/mine/adapter", tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    for named, said in (
        ({"base": "checkpoints/gone-NVFP4A16", "format": "nvfp4"}, rf"run `qerl quantize --model {base}` first"),
        ({}, r"trained_on\.json names no base and format: write `--model BASE"),
    ):
        (adapter / "trained_on.json").write_text(json.dumps(named))
        with pytest.raises(CheckpointError, match=said):
            resolve_model(str(adapter))


def test_a_card_says_why_it_names_no_16_bit_model(nvfp4_base, tmp_path):
    other = shutil.copytree(nvfp4_base, tmp_path / "other")
    origin = TrainedOn(str(other), "nvfp4")
    report = json.loads((other / REPORT).read_text())
    for changed, said in (
        ({**report, "method": "awq"}, "was rescaled when it was quantized"),
        ({}, "is not known: the folder of the base does not name it"),
    ):
        (other / REPORT).write_text(json.dumps(changed))
        assert plain_base(origin) is None
        card = card_text("runs/x/adapter", origin)
        assert said in card
        (block,) = blocks(card)
        assert "CompressedTensorsConfig(dequantize=True)" in block
    (other / REPORT).write_text('{"source": "tiny"}')
    assert plain_base(origin) == str(TINY_FOLDER)


@pytest.fixture(scope="module", params=["frozen", "trained"])
def started(request, started_base, tmp_path_factory):
    """(kind, the folder of a finished run `runs/mine`) of a run with a start of rank 8 and trained norms."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = (f"adapter.start={request.param}", "adapter.start_rank=8", "adapter.rank=12", "adapter.alpha=24")
    others = ("adapter.train_norms=true", "noise.enabled=false", "optim.learning_rate=0.01")
    start(small_config(started_base, folder, *settings, *others, steps=2, out="runs/mine"), "tiny")
    return request.param, folder / "runs/mine"


def scores(run, model):
    """Logprobs of two completions by qerl's engine with the run's adapter, and by a model of transformers."""
    prompt, answer = [5, 6, 7], [9, 10, 11, 12]
    engine = open_model(resolve_model(str(run / "adapter")), EngineOptions(engine="transformers"))
    ours = torch.tensor(engine.score([prompt], [answer])[0])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    return ours, logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def test_the_lines_of_a_card_load_the_start_that_acts(started, base, started_base, monkeypatch, capsys):
    kind, run = started
    named = json.loads((run / "adapter/trained_on.json").read_text())
    start = {"kind": kind, "rank": 8, "digest": digest_of(read_start(BaseStart(started_base / START, 8)))}
    assert named == {"base": str(started_base), "format": "nvfp4", "start": start}
    monkeypatch.chdir(run.parents[1])
    card = (run / "adapter/README.md").read_text(encoding="utf-8")
    *plain, exact = blocks(card)
    names = {}
    exec(compile(exact, "README.md", "exec"), names)
    assert capsys.readouterr().out
    model = names["model"].float().eval()
    for name, weight in decoded_weights(started_base).items():  # the block rounds them, and norms, to bfloat16
        model.get_submodule(f"base_model.model.{name}").base_layer.weight.data.copy_(weight)
    norms = {name: t for name, t in read_adapter(run / "adapter")[0].items() if ".lora_" not in name}
    for name, tensor in norms.items():
        saved = model.get_submodule(f"base_model.model.{name.removesuffix('.weight')}").modules_to_save
        assert (saved["default"].weight - 1).abs().max() > 0.001  # trained
        saved["default"].weight.data.copy_(tensor)
    assert len(norms) == 4
    ours, theirs = scores(run, model)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
    peft_base = json.loads((run / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    if kind == "frozen":
        model.base_model.set_adapter("default")
        assert (scores(run, model)[1] - ours).abs().max() > 0.01  # the start acts
        assert (len(plain), peft_base) == (1, str(base))
        assert "beside the frozen start" in card
    else:
        assert (plain, peft_base) == ([], str(started_base))
        assert f"which the 16-bit `{base}` does not need" in card
        (line,) = re.findall(r"```bash\n(.*?)\n```", card, re.DOTALL)
        assert line == f"qerl merge --adapter {run / 'adapter'} --to adapter --onto original"


def test_the_best_adapter_and_one_without_tokenizer_know_the_start_too(started, started_base, tmp_path):
    """The tokenizer is missing where the base is not here any more."""
    kind, run = started
    copy, gone = shutil.copytree(run, tmp_path / "mine"), tmp_path / "gone-NVFP4A16"
    shutil.rmtree(copy / "adapter")
    for path in (copy / "config.yaml", *copy.glob("checkpoints/*/adapter_config.json")):
        path.write_text(path.read_text().replace(str(started_base), str(gone)))
    for folder in copy.glob("checkpoints/*"):
        (folder / CHECKSUMS).unlink()
        seal(folder)
    for folder in (settle_best(copy, Best(2, "accuracy", 0.5)), settle_result(copy, 2)):
        assert not (folder / "README.md").exists()
        assert start_of_adapter(folder).kind == kind
        assert json.loads((folder / "trained_on.json").read_text())["base"] == str(gone)


def test_the_card_on_experts_names_the_merge_in_place_of_lines_that_transformers_reads_wrongly(nvfp4_moe, tmp_path):
    other = shutil.copytree(nvfp4_moe, tmp_path / "other")
    (other / REPORT).unlink()
    begun = TrainedStart("trained", 4, "0" * 16)
    for base, acts, plain in ((nvfp4_moe, None, 1), (nvfp4_moe, begun, 0), (other, None, 0)):
        card = card_text("runs/my run/adapter", TrainedOn(str(base), "nvfp4", acts))
        assert "CompressedTensorsConfig" not in card
        assert "leaves out the global scales of experts" in card
        assert "qerl merge --adapter 'runs/my run/adapter' --to bf16\n" in card
        assert len(blocks(card)) == plain  # the lines of the 16-bit model
    assert len(blocks(card_text("a", TrainedOn("tiny_experts", "bf16")))) == 1
