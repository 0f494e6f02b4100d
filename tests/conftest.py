"""Fixtures that tests of several packages share."""

import gc
import logging
import os
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml

from tests.helpers.bases import write_base
from tests.helpers.card import skip_without_card

# files that begin first, the slowest of all before the others, so that no process is left alone at the end
SLOW = """ranks hybrid_run run docs one_pass trial_adapter merge adapter_start cli episodes qat telemetry validation_run
sources grading portable sft_run metrics_page of_trl devices families prolong episodes_run environments experts_run
errors_table tutorials"""


def pytest_collection_modifyitems(items) -> None:
    skip_without_card(items)
    places = {f"test_{name}.py": place for place, name in enumerate(SLOW.split())}
    items.sort(key=lambda item: places.get(item.path.name, len(SLOW)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each file to one process, and files that share something to the same."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return shared(config.rootpath, super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@cache
def shared(root, file):
    """What is made once for a file and others: the server that processes are forked from, the syntax trees of all
    sources, or the bases of `quantize` and the import of llmcompressor. For most it is the file itself."""
    text = (root / file).read_text(encoding="utf-8")
    used = re.search(r"^from tests\.helpers(?:\.| import )(run_process|ranks|syntax)\b", text, re.MULTILINE)
    if used:
        return used[1].replace("ranks", "run_process")
    return "quantize" if file.startswith("tests/quantize/") else file


gc.disable()  # until all tests are collected: what they import is no garbage


def pytest_collection_finish() -> None:
    """Exclude the objects that imports made from garbage collection: each run of the trainer does a full one."""
    set_aside()
    gc.set_threshold(50_000)
    gc.enable()


FREEZE, UNFREEZE = gc.freeze, gc.unfreeze


def set_aside() -> None:
    """Leave out what there is now from garbage collection, except for what is garbage already."""
    gc.collect()
    FREEZE()


@pytest.fixture(scope="session", autouse=True)
def imports_stay_set_aside():
    """A run sets aside what was there before it and puts back everything afterwards. The next ones would look through
    all of it, so here what the first one has imported is set aside for good."""
    ended = []

    def unfreeze():
        if not ended:
            ended.append(set_aside())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", unfreeze)
        yield


@pytest.fixture
def runs_set_aside(monkeypatch):
    """Runs do so, as outside the tests."""
    monkeypatch.setattr(gc, "freeze", FREEZE)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)


@pytest.fixture(scope="module", autouse=True)
def collected():
    """What a file of tests leaves behind is collected once, and what is still there then is not looked at again."""
    yield
    set_aside()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """No test cuts the power, and a run of six steps waits for the disk as long as for two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_card_of_peft():
    """PEFT renders a model card at each save, which `save_adapter` deletes: in tests it is an empty file."""
    with pytest.MonkeyPatch.context() as patch:
        if "peft" in sys.modules:
            card = "peft.PeftModel.create_or_update_model_card"
            patch.setattr(card, lambda model, folder: Path(folder, "README.md").touch())
        yield


@pytest.fixture(scope="session", autouse=True)
def versions_read_once():
    """Nothing is installed meanwhile, and each run reads and parses what is known of eight packages twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", cache(metadata.version))
        yield


@pytest.fixture(scope="session", autouse=True)
def recipes_parsed_once():
    """PyYAML takes 20 ms for a recipe, and a text has the same nodes each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "compose", cache(yaml.compose))
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: with matrices this small, threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A random 16-bit Qwen3 base."""
    return write_base(tmp_path_factory.mktemp("base") / "qwen3")


@pytest.fixture(scope="session")
def nvfp4_base(base, tmp_path_factory):
    """The same base, quantized by `quantize`."""
    from quantize.run import quantize_checkpoint
    from tests.helpers.roundings import ROUNDING

    out = tmp_path_factory.mktemp("nvfp4") / "qwen3-NVFP4A16"
    quantize_checkpoint(str(base), out, ROUNDING)
    return out


@pytest.fixture(scope="session")
def nvfp4_moe(tmp_path_factory):
    """A random mixture of experts, quantized: four in each of two layers, two for each token."""
    from quantize.run import quantize_checkpoint
    from tests.helpers.roundings import ROUNDING

    out = tmp_path_factory.mktemp("moe") / "qwen3-moe-NVFP4A16"
    quantize_checkpoint(str(write_base(out.parent / "qwen3-moe", "qwen3_moe")), out, ROUNDING)
    return out


@pytest.fixture
def fresh_seed(request):
    """Seed torch anew in each run. pytest shows the seed with a failure, and QERL_TEST_SEED sets it."""
    seed = int(os.environ.get("QERL_TEST_SEED", int.from_bytes(os.urandom(4))))
    request.node.add_report_section("setup", "seed", f"QERL_TEST_SEED={seed} repeats it")
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def compiled(monkeypatch):
    """The names of Triton kernels in the order of compilation; tests clear the list once every kernel has run."""
    from triton import knobs

    names = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: names.append(fn.name))
    return names


@pytest.fixture
def here(monkeypatch, capfd):
    """Run `qerl ...` in this process, which has already imported torch. Returns (exit code, stdout, stderr)."""
    import qerl.cli.main

    def run(*arguments):
        capfd.readouterr()  # what fixtures and earlier calls of the test have printed
        monkeypatch.setattr(sys, "argv", ["qerl", *map(str, arguments)])
        monkeypatch.setattr(logging.root, "handlers", [])  # with pytest's handlers qerl would add none
        with pytest.raises(SystemExit) as ended:
            qerl.cli.main.main()
        return ended.value.code, *capfd.readouterr()

    return run
