"""The list of mistakes fits the code, and a mistake that no test sees is a survivor."""

from pathlib import Path

import mutants
import pytest

ROOT = Path(mutants.__file__).parents[2]


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.purpose)
def test_each_mistake_can_be_made(mutant):
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert (ROOT / mutant.test).is_file()


@pytest.mark.parametrize(("checked", "survives"), [("half(4) == 2", False), ("half(0) == 0", True)])
def test_a_mistake_survives_if_no_test_fails_and_the_file_is_put_back(checked, survives, tmp_path):
    (tmp_path / "halves.py").write_text("def half(x): return x / 2\n")
    (tmp_path / "test_halves.py").write_text(f"from halves import half\ndef test(): assert {checked}\n")
    mutant = mutants.Mutant("half of it", "halves.py", "x / 2", "x / 3", "test_halves.py")
    assert mutants.passes(mutant.test, tmp_path)
    assert mutants.survives(mutant, tmp_path) is survives
    assert "x / 2" in (tmp_path / "halves.py").read_text()
