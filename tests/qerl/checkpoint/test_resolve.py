"""What a --model is, decided by its files alone."""

import os
import shutil

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint import hub
from qerl.checkpoint.folder import EMBEDDED, TINY_FOLDER, beside, default_quantized_dir
from qerl.checkpoint.resolve import ModelRef, describe, newest_model, resolve_model
from tests.helpers.checkpoint_factory import fake_checkpoint
from tests.helpers.model_folders import hub_snapshot, make_adapter, make_base, make_nvfp4, make_run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Call it to leave the empty folder in which a test begins for another one."""
    monkeypatch.chdir(tmp_path)

    def leave():
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")

    return leave


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The folder of some/model in the hub's cache; there is no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return hub_snapshot(tmp_path / "cache", "some/model", fake_checkpoint)


def test_a_model_is_recognised_by_its_files(tmp_path):
    base, nvfp4 = make_base(), make_nvfp4()
    assert resolve_model("models/Small-1B") == ModelRef("base16", base, "models/Small-1B", None, None, "bf16")
    for load in ("auto", "nvfp4"):
        found = resolve_model(str(nvfp4), load)
        assert found == ModelRef("quantized", nvfp4, str(nvfp4), None, None, "nvfp4")
    folder = make_adapter(tmp_path / "my adapter", nvfp4)
    assert resolve_model(str(folder)) == ModelRef("adapter", folder, str(nvfp4), folder, None, "nvfp4")
    run = make_run(tmp_path, nvfp4, steps=(5, 40, 100))
    last = run / "checkpoints" / "step-000100"
    assert resolve_model(str(run)) == ModelRef("run", run, str(nvfp4), last, run, "nvfp4")
    final = make_adapter(run / "adapter", "whatever")
    assert resolve_model(str(run)).adapter == final


def test_steps_count_as_numbers_and_unfinished_checkpoints_do_not_count(tmp_path):
    run = make_run(tmp_path, make_nvfp4(), steps=())
    for name in ("step-9", "step-10", ".step-000011.partial"):
        make_adapter(run / "checkpoints" / name, "base")
    assert resolve_model(str(run)).adapter.name == "step-10"


def test_the_embedded_model_is_named_by_a_word_and_not_by_a_folder(tmp_path):
    make_nvfp4("tiny")
    found = resolve_model("tiny")
    assert (found.kind, found.format, found.base) == ("base16", "bf16", str(TINY_FOLDER))
    assert resolve_model("./tiny").kind == "quantized"


def test_an_adapter_can_be_given_beside_the_model(tmp_path):
    base, nvfp4 = make_base(), make_nvfp4()
    run = make_run(tmp_path, nvfp4)
    folder = make_adapter(tmp_path / "other", base)
    assert resolve_model(str(base), adapter=str(folder)).adapter == folder
    assert resolve_model(str(base), adapter=str(run)).adapter == run / "checkpoints" / "step-000040"
    assert resolve_model(str(run), adapter=str(folder)).adapter == folder
    with pytest.raises(CheckpointError, match="is a model, not an adapter"):
        resolve_model(str(nvfp4), adapter=str(base))


def test_load_takes_the_other_folder_of_a_model_where_there_is_one():
    base = make_base()
    folder = make_nvfp4(source=base.resolve())
    assert resolve_model(str(base), "nvfp4").base == str(folder)
    assert resolve_model(str(base), "auto").format == "bf16"
    found = resolve_model(str(folder), "bf16")
    assert (found.base, found.format, found.path) == (str(base.resolve()), "bf16", folder)


@pytest.mark.parametrize(
    ("model", "load", "said"),
    [
        ("models/Small-1B", "nvfp4", "run `qerl quantize --model models/Small-1B`"),
        ("tiny", "nvfp4", "run `qerl quantize --model tiny`"),
        ("some/model", "nvfp4", "run `qerl quantize --model some/model`"),
        ("checkpoints/Other-1B-NVFP4A16", "bf16", r"holds NVFP4 weights only.*--load nvfp4"),
        ("models/Small-1B", "fp8", "write auto, nvfp4, fp8_block, bf16 or mixed"),
    ],
)
@pytest.mark.usefixtures("cached")
def test_a_format_that_is_not_there_says_what_to_type(model, load, said):
    make_base()
    make_nvfp4("checkpoints/Other-1B-NVFP4A16")
    with pytest.raises(CheckpointError, match=said):
        resolve_model(model, load)


def test_load_nvfp4_does_not_take_another_model_of_the_same_name(tmp_path):
    base, other = make_base(), make_base("elsewhere/Small-1B")
    make_nvfp4(source=other.resolve())
    with pytest.raises(CheckpointError, match=r"was made from .*elsewhere/Small-1B, not from models/Small-1B"):
        resolve_model(str(base), "nvfp4")
    shutil.rmtree(other)  # moved to models/: the folder in the report is gone, and only the name is left
    assert resolve_model(str(base), "nvfp4").kind == "quantized"


def test_a_run_whose_base_is_a_16_bit_model_loads_in_the_format_of_its_recipe(tmp_path):
    base = make_base()
    nvfp4 = make_nvfp4(source=base.resolve())
    run = make_run(tmp_path, base, model_format="nvfp4")
    assert resolve_model(str(run)).base == str(nvfp4)
    assert resolve_model(str(run), "bf16").base == str(base)
    twin = make_run(tmp_path, base, "r2", model_format="bf16")
    assert resolve_model(str(twin)).base == str(base)
    assert resolve_model(str(twin), "nvfp4").base == str(nvfp4)


def test_the_base_of_a_run_is_found_from_elsewhere(tmp_path, elsewhere):
    """Also that of the run that a run began from, and before one of the same name in the current folder."""
    base = make_base()
    nvfp4 = make_nvfp4(source=base.resolve()).resolve()
    runs = [
        make_run(tmp_path, "checkpoints/Small-1B-NVFP4A16"),
        make_run(tmp_path, base.resolve(), "r2", model_format="nvfp4"),
        make_run(tmp_path, "runs/r1", "r3"),
    ]
    elsewhere()
    for _ in range(2):
        assert [resolve_model(str(run)).base for run in runs] == [str(nvfp4)] * 3
        make_nvfp4(source=base)


def test_a_run_that_began_from_an_adapter_has_the_base_of_that_adapter(tmp_path):
    """The adapter of the run includes the one that it began from."""
    base = make_nvfp4()
    first = make_run(tmp_path, base, "first")
    for name, start in (("second", first), ("third", make_adapter(tmp_path / "loose", base))):
        found = resolve_model(str(make_run(tmp_path, start, name)))
        assert found.base.endswith(str(base))
        assert found.format == "nvfp4"
        assert found.adapter == tmp_path / "runs" / name / "checkpoints" / "step-000040"
        assert found.run == found.path == tmp_path / "runs" / name


def test_a_hub_id_in_the_cache_needs_no_network(tmp_path, cached):
    """It stays one if a folder here has the name of its owner."""
    assert resolve_model("some/model") == ModelRef("base16", cached, "some/model", None, None, "bf16")
    assert hub.download_model("some/model") == cached
    (tmp_path / "some" / "other").mkdir(parents=True)
    assert resolve_model("some/model").path == cached
    with pytest.raises(CheckpointError, match=r"no folder some/modle \(beside it: some/other\), and the hub cannot be"):
        resolve_model("some/modle")


def test_which_names_are_hub_ids():
    make_base()
    assert hub.is_hub_id("Qwen/Qwen2.5-7B-Instruct")
    for ref in ("a/b/c", "../x", "/etc/x", "name", ".hidden/x", "models/Small-1B"):  # the last one is a folder here
        assert not hub.is_hub_id(ref)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        *((model, "Small-1B") for model in ("models/Small-1B", "models/Small-1B/", "./models/../models/Small-1B")),
        *((model, "tiny") for model in ("tiny", str(TINY_FOLDER))),
    ],
)
def test_default_folder_of_a_quantized_model(model, name):
    make_base()
    assert str(default_quantized_dir(model)) == f"checkpoints/{name}-NVFP4A16"


def test_the_newest_is_chosen_by_time_without_those_that_cannot_be_used(tmp_path, caplog):
    assert newest_model() is None
    folder = make_nvfp4()
    run, young = make_run(tmp_path, folder), make_run(tmp_path, folder, "r2", steps=())
    hidden = make_nvfp4("checkpoints/.Small-1B-NVFP4A16.partial")
    files = folder / "config.json", run / "metrics.jsonl", young / "metrics.jsonl", hidden / "config.json"
    for when, file in enumerate(files):
        os.utime(file, (100 * when, 100 * when))
    assert newest_model().run.name == "r1"
    assert "passing over runs/r2" in caplog.text
    os.utime(files[0], (150, 150))
    assert newest_model().kind == "quantized"


def test_descriptions_name_the_base_and_the_adapter(tmp_path):
    folder = make_nvfp4()
    assert describe(resolve_model(str(folder))) == "NVFP4 checkpoint checkpoints/Small-1B-NVFP4A16"
    run = make_run(tmp_path, folder)
    assert describe(resolve_model(str(run))) == (
        f"run {run}, nvfp4 base checkpoints/Small-1B-NVFP4A16, adapter {run}/checkpoints/step-000040"
    )


def test_every_embedded_model_is_found_by_its_word_wherever_a_folder_has_that_name(tmp_path):
    """A run that names it is not led to another folder of that name above it."""
    for word, folder in EMBEDDED.items():
        make_nvfp4(word)
        run = make_run(tmp_path, word, word)
        assert beside(run, word) == word
        assert resolve_model(word).path == folder
