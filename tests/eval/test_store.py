"""An evaluation's folder: whole batches survive a kill at any byte, and no rows of another evaluation are used."""

import json
import multiprocessing

import pytest

from eval.result import COMPLETIONS, RESULT, SETTINGS, differences, open_store, write_json
from qerl.base.errors import CheckpointError

IDENTITY = {"task": "gsm8k", "samples": 2, "seed": 0}
BATCHES = [[(1, 0), (1, 1)], [(0, 0), (0, 1)], [(2, 0)]]
ROWS = [[{"row": row, "sample": sample, "completion": "a\u2028b\nc é"} for row, sample in batch] for batch in BATCHES]


def fill(folder, batches=ROWS):
    with open_store(folder, IDENTITY, overwrite=False) as store:
        for rows in batches:
            store.append(rows)
    return folder / COMPLETIONS


def resume(folder, batches=BATCHES):
    with open_store(folder, IDENTITY, overwrite=False) as store:
        return store.resume(batches)


def test_a_kill_at_any_byte_leaves_the_whole_batches(tmp_path):
    """The oracle is the list of byte offsets at which batches end, computed from the encoded rows."""
    path = fill(tmp_path)
    content = path.read_bytes()
    ends, end = [0], 0
    for rows in ROWS:
        end += len("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        ends.append(end)
    assert ends[-1] == len(content)
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends) - 1
        assert resume(tmp_path) == [row for batch in ROWS[:whole] for row in batch], cut
        assert path.read_bytes() == content[: ends[whole]], cut


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (2, b'{"row": 7, "sample": 0}'),  # another question
        (2, b'{"row": 1, "sample": 0}'),  # the first line twice
        (2, b"{broken"),
        (2, b"[1]"),
        (6, b'{"row": 3, "sample": 0}'),  # a line too many
    ],
)
def test_a_foreign_line_is_refused_with_its_number(tmp_path, line, text):
    path = fill(tmp_path)
    lines = path.read_bytes().split(b"\n")
    lines[line - 1 : line] = [text] if line <= 5 else [text, b""]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(CheckpointError, match=rf"line {line} of .*--overwrite"):
        resume(tmp_path)


def test_other_settings_are_refused_by_name(tmp_path):
    fill(tmp_path)
    with (
        pytest.raises(CheckpointError, match=r"samples 2, now 8; seed 0, now 1.*--overwrite"),
        open_store(tmp_path, {**IDENTITY, "samples": 8, "seed": 1}, overwrite=False),
    ):
        pass


def test_overwrite_starts_again_and_leaves_other_files(tmp_path):
    fill(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    write_json(tmp_path / RESULT, {"accuracy": 1})
    with open_store(tmp_path, {**IDENTITY, "seed": 1}, overwrite=True) as store:
        assert store.resume(BATCHES) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [COMPLETIONS, "notes.txt", SETTINGS]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_other_things_is_never_touched(tmp_path, overwrite):
    (tmp_path / COMPLETIONS).write_text("somebody else's\n")
    with pytest.raises(CheckpointError, match="holds no evaluation"), open_store(tmp_path, IDENTITY, overwrite):
        pass
    assert (tmp_path / COMPLETIONS).read_text() == "somebody else's\n"
    assert not (tmp_path / SETTINGS).exists()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "out").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"--out .*out cannot be made"),
        open_store(tmp_path / "out", IDENTITY, overwrite=False),
    ):
        pass


def _try_to_open(folder, answers):
    try:
        with open_store(folder, IDENTITY, overwrite=False):
            answers.put("opened")
    except CheckpointError as error:
        answers.put(str(error))


def test_two_processes_cannot_write_one_evaluation(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with open_store(tmp_path, IDENTITY, overwrite=False):
        process = context.Process(target=_try_to_open, args=(tmp_path, answers))
        process.start()
        assert "another process is evaluating" in answers.get(timeout=240)
        process.join()
    with open_store(tmp_path, IDENTITY, overwrite=False):
        pass


def test_batches_of_another_kernel_are_not_mixed(tmp_path):
    with open_store(tmp_path, IDENTITY, overwrite=False) as store:
        store.bind_engine({"name": "vllm", "kernel": "humming"})
    with open_store(tmp_path, IDENTITY, overwrite=False) as store:
        store.bind_engine({"name": "vllm", "kernel": "humming"})
        with pytest.raises(CheckpointError, match="begun with humming, and marlin"):
            store.bind_engine({"name": "vllm", "kernel": "marlin"})
        assert store.engine["kernel"] == "humming"


def test_differences_names_new_and_missing_settings():
    assert differences({"a": 1, "b": "x"}, {"a": 1, "c": [2]}) == "b x, now null; c null, now [2]"


@pytest.mark.parametrize("settings", [[], {"identity": []}, {"identity": IDENTITY, "engine": [1]}, {"identity": 7}])
def test_settings_of_another_shape_are_no_evaluation(tmp_path, settings):
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="holds no evaluation"):
        resume(tmp_path)
