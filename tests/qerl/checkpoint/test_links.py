"""Links in a model's folder lead no file of this machine into a model, a copy or a card."""

import shutil

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.resolve import adapter_folder, resolve_model
from qerl.checkpoint.source import read_source
from tests.helpers.checkpoint_factory import fake_checkpoint

FILES = "config.json", "tokenizer.json", "model.safetensors", "LICENSE", "chat_template.jinja", "generation_config.json"


def move_and_link(file, place):
    place.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        shutil.move(file, place)
    else:
        place.write_text("secret")
    file.symlink_to(place)


@pytest.mark.parametrize("name", [*FILES, "additional_chat_templates/tools.jinja"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, name):
    model = fake_checkpoint(tmp_path / "model")
    (model / name).parent.mkdir(exist_ok=True)
    move_and_link(model / name, tmp_path / "elsewhere" / "file")
    for read in (resolve_model, read_source, local_folder):
        with pytest.raises(CheckpointError, match=rf"model/{name} is a link to .*elsewhere/file"):
            read(str(model))


def test_links_within_the_folder_and_to_the_folder_are_followed(tmp_path):
    model = fake_checkpoint(tmp_path / "model")
    move_and_link(model / "tokenizer.json", model / "files" / "tokenizer.json")
    (tmp_path / "latest").symlink_to(model)
    (model / "notes.md").symlink_to(tmp_path / "anything")
    assert resolve_model(str(tmp_path / "latest")).kind == "base16"


def test_the_layout_of_the_hubs_cache_is_followed_to_its_own_blobs_only(tmp_path):
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123abc"
    fake_checkpoint(snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = snapshot.parents[1] / "blobs" / f"{number:040x}"
        blob.parent.mkdir(exist_ok=True)
        shutil.move(file, blob)
        file.symlink_to(f"../../blobs/{number:040x}")
    assert read_source(str(snapshot)).tensors
    move_and_link(snapshot / "LICENSE", tmp_path / "hub" / "models--other--one" / "blobs" / "ffff")
    with pytest.raises(CheckpointError, match="LICENSE is a link"):
        resolve_model(str(snapshot))


def test_blobs_that_are_themselves_a_link_are_not_the_cache(tmp_path):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abc"
    fake_checkpoint(snapshot)
    move_and_link(snapshot / "config.json", tmp_path / "elsewhere" / "config.json")
    (snapshot.parents[1] / "blobs").symlink_to(tmp_path / "elsewhere")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../blobs/config.json")
    with pytest.raises(CheckpointError, match=r"config.json is a link"):
        resolve_model(str(snapshot))


def test_the_files_of_an_adapter(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny", "peft_type": "LORA"}')
    move_and_link(adapter / "adapter_model.safetensors", tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is a link"):
        adapter_folder(str(adapter))
