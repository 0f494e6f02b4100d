"""The output folder appears whole or not at all, and no files of the user are deleted."""

import collections
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint import output
from qerl.checkpoint.output import FILES, check_space, check_target, list_files, staged_folder
from tests.helpers.checkpoint_factory import fake_checkpoint

QUANTIZED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != FILES]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def write_and_raise(out, error):
    with staged_folder(out) as staging:
        (staging / "new").write_text("new")
        raise error


def test_the_folder_appears_when_the_block_ends(tmp_path):
    out = tmp_path / "deep" / "er" / "out"
    with staged_folder(out) as staging:
        assert staging == out.with_name(".out.partial")
        (staging / "a").write_text("1")
        (staging / "sub").mkdir()
        (staging / "sub" / "b").write_text("2")
        assert not out.exists()
    assert contents(out) == {"a": "1", "sub/b": "2"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt("stop"), CheckpointError("stop")])
def test_nothing_is_left_when_the_block_raises(tmp_path, error):
    with pytest.raises(type(error), match="stop"):
        write_and_raise(tmp_path / "a" / "b" / "out", error)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def old(tmp_path):
    """A folder tmp_path/out that is there already."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    return out


@pytest.mark.parametrize("renameat2", [True, False])
def test_an_old_folder_is_exchanged_for_the_new_one(old, tmp_path, monkeypatch, renameat2):
    if not renameat2:
        monkeypatch.setattr(output.ctypes, "CDLL", lambda *args, **kwargs: object())
    with staged_folder(old) as staging:
        (staging / "new").write_text("new")
        assert contents(old) == {"old": "old"}
    assert contents(old) == {"new": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_exchange_has_no_moment_without_a_folder(old, monkeypatch):
    removed = []
    monkeypatch.setattr(output.shutil, "rmtree", lambda path, **_: removed.append((path.name, contents(path))))
    with staged_folder(old) as staging:
        (staging / "new").write_text("new")
    assert removed == [(".out.partial", {"old": "old"})]  # after the exchange this is the old folder


def test_an_old_folder_stays_when_the_block_raises(old):
    with pytest.raises(ValueError, match="stop"):
        write_and_raise(old, ValueError("stop"))
    assert contents(old) == {"old": "old"}


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "disk2").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk2" / "real")
    with staged_folder(tmp_path / "out") as staging:
        (staging / "a").write_text("1")
    assert (tmp_path / "out").is_symlink()
    assert contents(tmp_path / "disk2" / "real") == {"a": "1"}


WRITER = """
    import signal, sys, time
    from pathlib import Path
    from qerl.checkpoint.output import staged_folder
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests under nohup would inherit as ignored
    with staged_folder(Path(sys.argv[1])) as staging:
        (staging / "half").write_text("half")
        print("ready", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_writer_that_is_told_to_end_leaves_nothing(tmp_path, number):
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "new" / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "ready\n"
        writer.send_signal(number)
    assert writer.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_two_writers_do_not_disturb_each_other_and_a_killed_one_is_cleared_up_by_the_next(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "ready\n"
        with pytest.raises(CheckpointError, match="another process is writing"), staged_folder(tmp_path / "out"):
            pytest.fail("the folder is taken")
        assert contents(tmp_path / ".out.partial") == {"half": "half"}
        with staged_folder(tmp_path / "other" / "out") as staging:
            (staging / "a").write_text("1")
        writer.kill()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "other"]
    with staged_folder(tmp_path / "out") as staging:
        assert list(staging.iterdir()) == []
        (staging / "a").write_text("1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]
    assert contents(tmp_path / "out") == {"a": "1"}


@contextmanager
def folder_of_mode(mode):
    """A folder with the mode `mode`. Root may do everything, so inside the block we run as nobody."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:  # only one user may enter pytest's own folders
        Path(folder).chmod(mode)
        if root:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)
            Path(folder).chmod(0o700)


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["read only", "may not be entered"])
def test_a_folder_that_may_not_be_written_is_refused(mode):
    with folder_of_mode(mode) as folder:
        with pytest.raises(CheckpointError, match="cannot be written"), staged_folder(folder / "out"):
            pytest.fail("it was written")
        if not mode:  # before work already
            with pytest.raises(CheckpointError, match=r"cannot be written .Permission denied"):
                check_target(folder / "out", Path("source"), overwrite=False)


def test_a_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"), staged_folder(tmp_path / "file" / "out"):
        pytest.fail("it was written")


def test_a_full_disk_while_writing_says_how_to_fix_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"could not be written .No space left.*free some space"):
        write_and_raise(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_says_how_much_is_needed(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 3 * 2**30))
    check_space(tmp_path / "not" / "yet" / "out", 2 * 2**30)
    with pytest.raises(CheckpointError, match=r"needs 4\.06 GiB and .* has 3\.00 GiB free"):
        check_space(tmp_path / "not" / "yet" / "out", 4 * 2**30)


def test_targets_that_are_accepted(tmp_path):
    source = fake_checkpoint(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    written(tmp_path / "done")
    check_target(tmp_path / "new", source, overwrite=False)
    check_target(tmp_path / "empty", source, overwrite=False)
    check_target(tmp_path / "done", source, overwrite=True)


OTHERS = "holds something else than what qerl wrote there"
OWN = "is, holds or lies in the model's own folder"


@pytest.mark.parametrize(
    ("out", "overwrite", "message"),
    [
        ("done", False, "exists: write `--overwrite` to replace it"),
        *(("other", False, "exists"), ("other", True, OTHERS), ("base", True, OTHERS), ("file", True, "is a file")),
        *(("source", True, OWN), ("source/out", False, OWN), ("link", True, OWN), (".", True, OWN)),
    ],
)
def test_targets_that_are_refused(tmp_path, out, overwrite, message):
    source = fake_checkpoint(tmp_path / "source")
    fake_checkpoint(tmp_path / "base", quantization_config=QUANTIZED)  # made by another program
    fake_checkpoint(tmp_path / "done", quantization_config=QUANTIZED)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(CheckpointError, match=message):
        check_target(tmp_path / out, source, overwrite)


def written(folder, *others):
    """A folder that quantize may have written, with files of others in it."""
    fake_checkpoint(folder)
    (folder / "quantize_report.json").write_text('{"format": "nvfp4-pack-quantized"}')
    (folder / "LICENSES").mkdir()
    (folder / "LICENSES" / "theirs.txt").write_text("of the source")
    list_files(folder)
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    return folder


MIXED = (
    "thesis.docx", "checkpoints/state.pt", ".git/config", "eval/result.json", "train.py", "other-model.safetensors",
    "code.py/thesis.txt", "LICENSES/mine.txt", "tokenizer_work/mine.txt", "additional_chat_templates/thesis.txt",
    "tokenizer-of-mine.json", "quantize_report.json", "deep/qerl_files.json",
)  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_only_what_qerl_wrote_is_replaced_without_force(tmp_path, name):
    check_target(written(tmp_path / "ours"), tmp_path / "source", overwrite=True)
    out = written(tmp_path / "mixed", name)
    with pytest.raises(CheckpointError, match=rf"something else .*\({name}.*`--force`"):
        check_target(out, tmp_path / "source", overwrite=True)
    check_target(out, tmp_path / "source", overwrite=False, force=True)


def test_neither_links_nor_empty_folders_nor_changed_files_are_ours(tmp_path):
    folders = [written(tmp_path / f"out-{number}") for number in range(4)]
    (folders[0] / "notes").symlink_to(tmp_path)
    (folders[1] / "empty").mkdir()
    (folders[2] / "config.json").write_text("{} ")
    weights = folders[3] / "model.safetensors"
    weights.write_bytes(bytes(output.WHOLE_BYTES + 9))
    list_files(folders[3], ["model.safetensors"])
    check_target(folders[3], tmp_path / "source", overwrite=True)
    weights.write_bytes(bytes(output.WHOLE_BYTES + 8) + b"1")
    reasons = "notes", "empty", r"config\.json has changed", "safetensors has changed"
    for folder, said in zip(folders, reasons, strict=True):
        with pytest.raises(CheckpointError, match=said):
            check_target(folder, tmp_path / "source", overwrite=True)


def test_a_damaged_or_missing_list_is_not_trusted(tmp_path):
    for number, text in enumerate((None, "[", "[]", '{"config.json": 3}')):
        out = written(tmp_path / f"out-{number}")
        (out / FILES).unlink() if text is None else (out / FILES).write_text(text)
        with pytest.raises(CheckpointError, match=OTHERS):
            check_target(out, tmp_path / "source", overwrite=True)


@pytest.mark.parametrize("place", ["home", "work", "."])
def test_force_never_replaces_the_current_or_the_home_folder(tmp_path, monkeypatch, place):
    for name in ("home", "work"):
        written(tmp_path / name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(CheckpointError, match="current or the home folder"):
        check_target(tmp_path / place, tmp_path.parent / "source", overwrite=True, force=True)
