"""Checkpoints on disks that are full or have lost data: which one is found, and what a full disk costs."""

import json
import resource
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from qerl.base.errors import CheckpointError
from qerl.checkpoint.folder import CHECKSUMS
from tests.helpers.small_run import numbers, small_config
from training.policy.policy import AdapterPolicy
from training.run import resume, start
from training.run_dir.checkpoint import FILES, checkpoint_step, checkpoints, newest_checkpoint, write_checkpoint
from training.run_dir.log import RunLog, read_metrics


def bytes_of(run_dir):
    """Of its last checkpoint."""
    return sum(file.stat().st_size for file in (run_dir / "checkpoints" / "step-000006").iterdir())


@pytest.fixture
def copy(whole_run, tmp_path):
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def unlist(path):
    sums = json.loads(path.read_text())
    del sums["optimizer.pt"]
    path.write_text(json.dumps(sums))


DAMAGE = {
    "a file cut short": ("optimizer.pt", cut, "does not match its checksum"),
    **{f"{name} with a flipped bit": (name, flip, "does not match its checksum") for name in sorted(FILES)},
    "a file gone": ("scheduler.pt", Path.unlink, "scheduler.pt is missing"),
    "no checksums": (CHECKSUMS, Path.unlink, "it has no readable checksums.json"),
    "checksums that are no text": (CHECKSUMS, lambda path: path.write_bytes(b"\xff\xfe\x00"), "no readable checksums"),
    "checksums of nothing": (CHECKSUMS, lambda path: path.write_text("{}"), "does not list adapter_config.json, "),
    "checksums without the optimizer": (CHECKSUMS, unlist, "does not list optimizer.pt"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_and_named(copy, caplog, case):
    name, damage, message = DAMAGE[case]
    damage(copy / "checkpoints" / "step-000006" / name)
    assert newest_checkpoint(copy).name == "step-000004"
    assert "step-000006 is skipped: " in caplog.text
    assert message in caplog.text


def test_checkpoints_are_ordered_by_their_step_and_other_folders_left_alone(copy):
    for name in ("step-000006.bak", "step-best", ".step-000008.partial", "step-1000000", "step-999999"):
        shutil.copytree(copy / "checkpoints" / "step-000004", copy / "checkpoints" / name)
    assert [checkpoint_step(path) for path in checkpoints(copy)] == [4, 6, 999_999, 1_000_000]
    assert newest_checkpoint(copy).name == "step-1000000"


def test_without_a_good_checkpoint_the_run_begins_again(copy, whole_run):
    for path in checkpoints(copy):
        cut(path / "adapter_model.safetensors")
    shutil.rmtree(copy / "adapter")
    assert numbers(resume(copy).run_dir) == numbers(whole_run)


@contextmanager
def largest_file(size):
    """Files may not grow beyond `size` bytes, so that the system refuses a write as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_if_a_file_cannot_be_written_the_earlier_checkpoint_stays(whole_run, nvfp4_base, tmp_path, monkeypatch):
    """Half of the adapter fits. What torch says of half of an optimizer's state is below."""
    size = (whole_run / "checkpoints" / "step-000004" / "adapter_model.safetensors").stat().st_size // 2
    until_it_failed, save = ExitStack(), AdapterPolicy.save

    def limited(policy, folder):
        if "step-000004" in folder.name:
            until_it_failed.enter_context(largest_file(size))
        return save(policy, folder)

    with until_it_failed, monkeypatch.context() as patch:
        patch.setattr(AdapterPolicy, "save", limited)
        with pytest.raises(CheckpointError, match=r"the checkpoint of step 4 could not be written \(.*--resume"):
            start(small_config(nvfp4_base, tmp_path), "tiny")
    run_dir = tmp_path / "run"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000002"]
    assert numbers(resume(run_dir).run_dir) == numbers(whole_run)


def test_metrics_that_cannot_be_written_give_one_line(tmp_path):
    log = RunLog(tmp_path, 3)
    log.write_step(1, {"reward": 0.5})
    with largest_file(40), pytest.raises(CheckpointError, match=r"metrics of step 2 could not be written \(.*--resume"):
        log.write_step(2, {"reward": 0.5})
    log.start_at(1)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def can_mount():
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", "/tmp"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_a_disk = pytest.mark.skipif(not can_mount(), reason="a small disk needs the right to mount one (unshare -rm)")


@contextmanager
def small_disk(folder, size):
    """A real disk of `size` bytes, mounted at `folder` for one waiting process only. Gives its path from here."""
    script = f"mount -t tmpfs -o size={size} tmpfs '{folder}' && echo mounted && read -r"
    command = ["unshare", "-rm", "bash", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "mounted\n"
        yield Path(f"/proc/{holder.pid}/root{folder}")


@needs_a_disk
def test_a_full_disk_costs_no_step_while_an_older_checkpoint_can_be_deleted(whole_run, nvfp4_base, tmp_path, caplog):
    """A real disk with room for two and a half checkpoints, for a run that would keep three."""
    used = bytes_of(whole_run)
    with small_disk(tmp_path, int(2.5 * used) + 100_000) as disk:
        result = start(small_config(nvfp4_base, tmp_path, "run.keep_checkpoints=3", out=disk / "run"), "tiny")
        assert "step-000002 deleted to make room" in caplog.text
        assert [checkpoint_step(path) for path in checkpoints(result.run_dir)] == [4, 6]
        assert numbers(result.run_dir) == numbers(whole_run)
    assert not (tmp_path / "run").exists()  # nothing was written to another disk


@needs_a_disk
def test_a_disk_without_room_for_one_checkpoint_is_refused_before_anything_is_written(whole_run, nvfp4_base, tmp_path):
    used = bytes_of(whole_run)
    with small_disk(tmp_path, int(0.3 * used)) as disk:
        config = small_config(nvfp4_base, tmp_path, out=disk / "run")
        with pytest.raises(CheckpointError, match=r"takes [\d.]+ MiB, and the disk of .* has [\d.]+ MiB left: free"):
            start(config, "tiny")
        assert not (disk / "run").exists()


def test_without_an_earlier_checkpoint_none_is_said_to_be_untouched(tmp_path):
    """torch's own words would name a line of its source, and not the disk."""

    def write(folder):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    with pytest.raises(CheckpointError, match=r"\(the disk took only a part of a file\); there is none before it"):
        write_checkpoint(tmp_path, 2, 1, write)
