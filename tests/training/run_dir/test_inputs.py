"""A run does not continue in silence with other rows, rewards or packages than it began with."""

import json
import shutil

import pytest

import training.run_dir.inputs
from qerl.base.errors import ConfigError
from tests.helpers.small_run import numbers, small_config
from training.run import resume, start

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def began(nvfp4_base, tmp_path_factory):
    """(folder, numbers) of a run of 3 steps whose last checkpoint is gone; its reward imports a module of its own."""
    folder = tmp_path_factory.mktemp("began")
    (folder / "own_helper.py").write_text("def share(text):\n    return sum(c.isdigit() for c in text) / 100\n")
    (folder / "reward.py").write_text(
        "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent))\n"
        "from own_helper import share\n\n\ndef digits(completions, **columns):\n"
        "    return [share(text) for text in completions]\n"
    )
    start(small_config(nvfp4_base, folder, steps=3), "tiny")
    whole = numbers(folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-000003")
    shutil.rmtree(folder / "run" / "adapter")
    shutil.copytree(folder, folder.with_name("kept"))
    return folder, whole


@pytest.fixture
def folder(began):
    """The folder of the run, put back afterwards."""
    folder, _ = began
    yield folder
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("kept"), folder)


def other_row(folder):
    rows = (folder / "rows.jsonl").read_text().splitlines()
    row = json.loads(rows[5])
    row["question"] += " "
    rows[5] = json.dumps(row | {"question": "What is 1 + 1?", "answer": "2"})
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


def append(name):
    return lambda folder: (folder / name).write_text((folder / name).read_text() + "\n# changed\n")


def older_package(folder):
    about = json.loads((folder / "run" / "run.json").read_text())
    about["versions"]["trl"] = "1.15.0"
    (folder / "run" / "run.json").write_text(json.dumps(about))


CHANGES = {
    "a row": (other_row, "the rows of the data changed, the prompts as tokens changed: put that back, or add"),
    "the reward": (append("reward.py"), r"the reward's source reward\.py changed: put"),
    "what the reward imports": (append("own_helper.py"), r"the reward's source own_helper\.py changed: put"),
    "a package": (older_package, r"trl is 1\.16\.0 and was 1\.15\.0: put that back, or add --accept-changes"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changed_is_refused_by_its_name(folder, case):
    change, message = CHANGES[case]
    change(folder)
    before = (folder / "run" / "run.json").read_text()
    with pytest.raises(ConfigError, match=message):
        resume(folder / "run")
    assert (folder / "run" / "run.json").read_text() == before


def test_what_changed_can_be_accepted_and_is_what_the_run_has_then(folder, caplog):
    other_row(folder)
    before = json.loads((folder / "run" / "run.json").read_text())
    assert resume(folder / "run", accept_changes=True).steps == 3
    assert "although" in caplog.text
    (change,) = json.loads((folder / "run" / "run.json").read_text())["changes"]
    assert (change["after"], change["was"]["inputs"]) == (2, before["inputs"])
    for left in ("checkpoints/step-000003", "adapter"):
        shutil.rmtree(folder / "run" / left)
    rows = (folder / "rows.jsonl").read_text()
    (folder / "rows.jsonl").write_text(rows.replace("\n", "\n\n"))  # not bytes are compared, but the rows in them
    assert resume(folder / "run").steps == 3


def test_a_run_of_an_earlier_version_is_accepted_with_a_warning(folder, began, caplog):
    about = json.loads((folder / "run" / "run.json").read_text())
    (folder / "run" / "run.json").write_text(json.dumps({**about, "inputs": None}))
    assert numbers(resume(folder / "run").run_dir) == began[1]
    assert "was begun without digests: whether its rows and rewards changed is not known" in caplog.text
    assert json.loads((folder / "run" / "run.json").read_text())["inputs"] == about["inputs"]


def test_a_package_that_was_installed_since_is_a_change(folder, monkeypatch):
    monkeypatch.setattr(training.run_dir.inputs, "PACKAGES", ("trl", "pytest"))
    with pytest.raises(ConfigError, match=r"pytest is [\d.]+ and was not installed"):
        resume(folder / "run")
