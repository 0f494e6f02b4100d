"""`qerl quantize --start-of`: the start of a folder that is there, from its 16-bit model."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.base_start import START, BaseStart, about_start, base_digest, check_start, read_start
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint, quantized
from quantize.start import make_start
from tests.helpers.checkpoint_factory import make_checkpoint
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.model_folders import hub_snapshot

RANK = 8

pytestmark = pytest.mark.usefixtures("one_thread")


def options(rows, method="auto", **values):
    asked = {"calibration": rows, "calibration_size": 24, "sequence_length": 48, "start_rank": RANK, **values}
    return QuantizeOptions(method, **asked)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model", "qwen2")


@pytest.fixture(scope="module")
def made(source, rows, tmp_path_factory):
    """(source, a folder with a start by rounding, its report)."""
    out = tmp_path_factory.mktemp("made") / "nvfp4"
    return source, out, quantize_checkpoint(str(source), out, options(rows, "rtn"))


@pytest.fixture
def bare(made, tmp_path):
    """The folder without its start."""
    folder = shutil.copytree(made[1], tmp_path / "bare")
    shutil.rmtree(folder / START)
    return folder


def test_it_is_the_start_that_quantize_writes(made, bare, rows):
    source, out, report = made
    before = {path.name: path.read_bytes() for path in bare.iterdir()}
    found = make_start(str(bare), str(source), None, options(rows))
    assert found.out == bare / START
    ours, theirs = (read_start(BaseStart(folder / START, RANK)) for folder in (bare, out))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert about_start(bare / START) == {**about_start(out / START), "base_digest": base_digest(bare)}
    check_start(BaseStart(bare / START, RANK), str(bare))
    assert found.outputs.started == report.outputs.started
    assert found.outputs.written == report.outputs.written
    assert before == {path.name: path.read_bytes() for path in bare.iterdir() if path.name != START}


def test_the_command_makes_one_of_another_rank_elsewhere(made, bare, rows, tmp_path):
    source = made[0]
    asked = options(rows, start_of=str(bare), start_rank=4, device="cpu")
    report = quantized(str(source), tmp_path / "elsewhere", None, asked)
    assert not (bare / START).exists()
    assert about_start(tmp_path / "elsewhere")["rank"] == 4
    assert report.start["rank"] == 4
    larger, smaller = read_start(BaseStart(made[1] / START, 4)), read_start(BaseStart(tmp_path / "elsewhere", 4))
    for module in {name.removesuffix(".lora_A.weight") for name in smaller if "lora_A" in name}:
        one, two = (
            each[f"{module}.lora_B.weight"].float() @ each[f"{module}.lora_A.weight"].float()
            for each in (larger, smaller)
        )
        assert float((one - two).norm() / one.norm()) < 0.05  # the first components of the larger one


def test_an_existing_start_needs_overwrite(made, rows, tmp_path):
    source, out, _ = made
    folder = shutil.copytree(out, tmp_path / "nvfp4")
    with pytest.raises(CheckpointError, match=r"start exists: write `--overwrite`"):
        make_start(str(folder), str(source), None, options(rows))
    make_start(str(folder), str(source), None, options(rows, start_rank=4, overwrite=True))
    assert about_start(folder / START)["rank"] == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds something else than what qerl wrote there"):
        make_start(str(folder), str(source), tmp_path / "mine", options(rows, overwrite=True))


def test_a_folder_by_awq_is_refused(source, rows, tmp_path):
    quantize_checkpoint(str(source), tmp_path / "awq", options(rows, "awq", start_rank=0))
    with pytest.raises(CheckpointError, match=r"has another model\.layers\.\S+ than .*AWQ, SmoothQuant"):
        make_start(str(tmp_path / "awq"), str(source), None, options(rows))
    assert not (tmp_path / "awq" / START).exists()


def test_another_model_of_the_same_shape_is_refused(source, bare, rows, tmp_path):
    other = make_checkpoint(tmp_path / "other", "qwen2", seed=1)
    with pytest.raises(CheckpointError, match=r"has another model\.\S+ than .*made from another model"):
        make_start(str(bare), str(other), None, options(rows))
    own, theirs = load_all(source), load_all(other)
    mixed = {name: theirs[name] if name.endswith("o_proj.weight") else tensor for name, tensor in own.items()}
    for path in other.glob("*.safetensors*"):
        path.unlink()
    save_file(mixed, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"was not made from .*\(model\.layers\.0\.self_attn\.o_proj differs\)"):
        make_start(str(bare), str(other), None, options(rows))
    assert sorted(path.name for path in bare.iterdir() if path.name.startswith((".", START))) == []


def test_a_model_of_another_size_is_refused(bare, rows, tmp_path):
    other = make_checkpoint(tmp_path / "other", "qwen2", intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"was not made from .* differs\)"):
        make_start(str(bare), str(other), None, options(rows))


def test_the_hubs_cache_is_never_written_to(source, bare, rows, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = hub_snapshot(tmp_path / "cache", "some/Model-NVFP4", lambda folder: shutil.copytree(bare, folder))
    for named in ("some/Model-NVFP4", str(cached)):
        with pytest.raises(CheckpointError, match=r"is in the hub's cache, .* write --out FOLDER as well"):
            make_start(named, str(source), None, options(rows))
    report = make_start("some/Model-NVFP4", str(source), tmp_path / "start", options(rows))
    assert (report.base, report.out) == ("some/Model-NVFP4", tmp_path / "start")
    assert not (cached / START).exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "gptq"}, "--method is for quantizing"),
        ({"ignore": ("re:.*mlp.*",)}, "--ignore is for quantizing"),
        ({"start_rank": 0}, "leave out --start-rank 0"),
    ],
)
def test_options_of_a_quantization_are_refused(source, bare, rows, values, words):
    with pytest.raises(ConfigError, match=words):
        make_start(str(bare), str(source), None, options(rows, **values))


def test_a_16_bit_folder_has_no_start(source, rows):
    with pytest.raises(CheckpointError, match="is not an NVFP4 folder"):
        make_start(str(source), str(source), None, options(rows))
