"""Headers of safetensors files: their content, and damage that is noticed without loading a tensor."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from qerl.base.errors import CheckpointError
from qerl.checkpoint.shards import INDEX, SINGLE, read_header, read_json, read_tensors, weight_files
from tests.helpers.checkpoint_factory import layout_tensors, write_safetensors


def test_header_of_a_real_file_has_every_dtype_and_shape(tmp_path):
    tensors = {
        "a": torch.zeros(3, 4, dtype=torch.bfloat16),
        "b": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "c": torch.tensor(1.5),
        "d": torch.zeros(0, 7, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    assert weight_files(tmp_path) == [tmp_path / SINGLE]
    found = {name: (info.dtype, info.shape, info.nbytes) for name, info in read_header(tmp_path / SINGLE).items()}
    expected = {"a": ("BF16", (3, 4), 24), "b": ("F8_E4M3", (2,), 2), "c": ("F32", (), 4), "d": ("U8", (0, 7), 0)}
    assert found == expected


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("F32", (4,)), "b": ("BF16", (2, 2))})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
            read_header(path)


def header(**entries):
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        b"<!DOCTYPE html><html>this is what a failed download looks like</html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 123456789\n",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 4) + b"[1] " + bytes(8),
        struct.pack("<Q", 8) + b"not json" + bytes(8),
        header(a={"dtype": "F32", "shape": [4]}),
        header(a={"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}),
        header(a={"dtype": "F32", "shape": [400], "data_offsets": [0, 1600]}),
        header(a=7),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is truncated or not a safetensors file"):
        read_header(tmp_path / "x.safetensors")


def sharded(folder):
    tensors = layout_tensors(layers=1)
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, chosen in files.items():
        write_safetensors(folder / file, {name: tensors[name] for name in chosen})
    weight_map = {name: file for file, chosen in files.items() for name in chosen}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tensors, weight_map


def test_tensors_of_all_shards_and_of_no_stray_file(tmp_path):
    tensors, weight_map = sharded(tmp_path)
    write_safetensors(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": ("BF16", (2, 2))})
    found = read_tensors(tmp_path)
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == tensors
    assert {name: info.file.name for name, info in found.items()} == weight_map
    assert {path.name for path in weight_files(tmp_path)} == set(weight_map.values())


def test_a_missing_shard_is_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 shards.*model-00002-of-00002\.safetensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        *((odd, "has no weight_map to file names") for odd in ({}, ["model.safetensors"], {"model.norm.weight": 1})),
        ({"a.b": "model-00001-of-00002.safetensors"}, r"says that a\.b is in"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path, weight_map, said):
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=said):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no model.safetensors and no"),
        (["pytorch_model.bin"], "only as pickled files .pytorch_model.bin"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "only as pickled files"),
        (["model-00001-of-00002.safetensors"], "no model.safetensors and no model.safetensors.index.json"),
    ],
)
def test_folders_without_weights_say_what_they_lack(tmp_path, files, message):
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[1]", "holds a JSON list"), (b"\xff\xfe", "not valid JSON"), (None, "cannot be read")],
)
def test_json_that_is_no_object_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=message):
        read_json(path)
