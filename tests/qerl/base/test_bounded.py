"""Files that others made are read within limits of size and depth, and only if they are regular files."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from qerl.base.errors import CheckpointError, DataError
from qerl.base.files import DEPTH, mode_by_umask, parse_json, read_bytes, write_shared
from qerl.base.read_back import Shape, read_object, read_rows
from qerl.checkpoint.folder import CHECKSUMS, read_sums
from qerl.checkpoint.shards import read_header, read_json, read_tensors
from qerl.config.recipe import read_config

DEEP = 100_000
NESTED = {"lists": "[" * DEEP + "]" * DEEP, "objects": '{"a":' * DEEP + "1" + "}" * DEEP, "open": "[" * DEEP}
EDGE = "[" * (DEPTH + 1) + "]" * (DEPTH + 1)  # few enough for Python's parser, too many for what comes after it


def test_json_of_a_usual_depth_is_read():
    text = "[" * DEPTH + "]" * DEPTH
    assert json.dumps(parse_json(text)) == text
    assert parse_json('{"brackets": "' + "[{" * DEEP + '"}') == {"brackets": "[{" * DEEP}


@pytest.mark.parametrize("text", [*NESTED.values(), EDGE], ids=[*NESTED, "edge"])
def test_json_that_nests_deeply_is_refused(text):
    with pytest.raises(ValueError, match=r"nested|Expecting"):
        parse_json(text)


def test_a_whole_number_too_long_for_any_use_is_refused():
    assert parse_json(f"[{2**64}, {int(1e30)}]") == [2**64, int(1e30)]
    with pytest.raises(ValueError, match="4000 digits"):
        parse_json("9" * 4000)


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_every_reader_of_json_refuses_deep_nesting_in_one_error(tmp_path, text):
    file = tmp_path / "file.json"
    file.write_text(text)
    (tmp_path / CHECKSUMS).write_text(text)
    with pytest.raises(CheckpointError, match=r"file.json is not valid JSON"):
        read_json(file)
    with pytest.raises(DataError, match=r"file.json is damaged"):
        read_object(file, Shape, "write it again")
    file.write_text(f"{text}\n{{}}\n")
    with pytest.raises(DataError, match=r"line 1 of .*file.json is damaged"):
        read_rows(file, Shape, "write it again")
    assert read_sums(tmp_path) is None


def test_a_file_that_is_no_regular_file_does_not_block(tmp_path):
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="no regular file"):
        read_bytes(pipe, 100)
    with pytest.raises(CheckpointError, match="no regular file"):
        read_json(pipe)
    with pytest.raises(DataError, match="no regular file"):
        read_object(pipe, Shape, "write it again")


def test_a_file_without_end_is_read_up_to_its_limit(tmp_path):
    file = tmp_path / "config.json"
    with file.open("wb") as handle:
        handle.truncate(1 << 40)  # sparse: it takes no room on the disk
    with pytest.raises(ValueError, match="more than 100 bytes"):
        read_bytes(file, 100)
    with pytest.raises(CheckpointError, match="more than"):
        read_json(file)
    with pytest.raises(DataError, match="more than"):
        read_rows(file, Shape, "write it again")


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(f'*{old}' for _ in range(9))}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "anchor or alias"),
        ("[" * DEEP, "nested"),
        ("- " * DEEP, "nested"),
        ("{a: " * 50_000, "nested"),
        ("? " * DEEP, "nested"),
        ("a:\n" + " " * 300 + "x: 1\n" * 200_000, "more than"),
    ],
    ids=["aliases", "lists", "dashes", "mappings", "keys", "size"],
)
def test_yaml_that_grows_or_nests_is_refused(tmp_path, text, said):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_config(file)


def header(tmp_path, value, data=b"\0" * 64):
    raw = (value if isinstance(value, str) else json.dumps(value)).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return file


def entry(dtype="F32", shape=(16,), offsets=(0, 64)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


WRONG = {
    "nested": NESTED["lists"],
    "no object": [],
    "entry": {"x": [1]},
    "dtype is a list": {"x": {"dtype": ["F32"], "shape": [16], "data_offsets": [0, 64]}},
    "text for a shape": {"x": {"dtype": "F32", "shape": "16", "data_offsets": [0, 64]}},
    "negative shape": {"x": entry(shape=(-4, -4))},
    "fraction": {"x": entry(shape=(16.0,))},
    "true": {"x": entry(shape=(16, True))},
    "many axes": {"x": entry(shape=(1,) * 60 + (16,))},
    "absurd size": {"x": entry(dtype="F4", shape=(10**18,) * 8)},
    "longest number": '{"x": {"dtype": "F4", "shape": [' + "9" * 4000 + '], "data_offsets": [0, 64]}}',
    "backwards": {"x": entry(dtype="F4", offsets=(64, 0))},
    "before the data": {"x": entry(offsets=(-64, 0))},
    "three offsets": {"x": entry(offsets=(0, 64, 64))},
    "text for offsets": {"x": entry(offsets=("0", "64"))},
    "beyond the data": {"x": entry(shape=(32,), offsets=(0, 128))},
    "shared bytes": {"x": entry(), "y": entry()},
}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_a_header_that_cannot_be_is_refused(tmp_path, value):
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        read_header(header(tmp_path, value))


def test_a_right_header_is_read(tmp_path):
    found = read_header(header(tmp_path, {"x": entry(), "empty": entry(shape=(0, 4), offsets=(64, 64))}))
    assert {name: (info.shape, info.nbytes) for name, info in found.items()} == {"x": ((16,), 64), "empty": ((0, 4), 0)}


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "sub/x.safetensors", "..", ""])
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    (tmp_path / "model").mkdir()
    header(tmp_path, {"x": entry()}).rename(tmp_path / "outside.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json has no weight_map"):
        read_tensors(tmp_path / "model")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_the_mode_of_a_file_follows_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
        mode_by_umask(tmp_path / "a.safetensors")
        write_shared(tmp_path / "a-0.cubin", b"first")
        write_shared(tmp_path / "a-0.cubin", b"second")
    finally:
        os.umask(before)
    assert (tmp_path / "a-0.cubin").read_bytes() == b"second"
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"a.safetensors": mode, "a-0.cubin": mode}
