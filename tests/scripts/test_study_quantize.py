"""scripts/study/study_quantize.py: its page is that of the shipped files, and a small study of a random model runs."""

import json
from pathlib import Path

import pytest

from scripts.study import study_quantize

FOLDER = Path(__file__).parents[2] / "benchmarks" / "quantization"
FILES = sorted(FOLDER.glob("*.json"))


def reports():
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in FILES}


def test_the_page_is_drawn_from_the_files():
    assert (FOLDER / "README.md").read_text(encoding="utf-8").endswith(study_quantize.page(list(reports().values())))


@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_where_gptq_is_recommended_it_was_measured_to_be_better(name):
    """The default with rows rests on this."""
    rows = {(row["method"], row.get("global_scale")): row for row in reports()[name]["results"]}
    for scale in study_quantize.SCALES:
        gptq, rtn = rows["gptq", scale], rows["rtn", scale]
        assert gptq["held_out"]
        for key in ("logit_error", "kl", "linear_error"):
            assert gptq[key] < rtn[key], key


def test_a_small_study_writes_a_file_and_prints_its_table(tmp_path, monkeypatch, capsys):
    small = {**study_quantize.SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    monkeypatch.setattr(study_quantize, "SHAPE", {**small, "num_key_value_heads": 1})
    monkeypatch.setattr(study_quantize, "OUTLIERS", (3,))
    out = tmp_path / "out.json"
    sizes = ["--layers", "1", "--size", "4", "--length", "32", "--methods", "rtn", "gptq"]
    monkeypatch.setattr("sys.argv", ["study_quantize.py", "--random", "--outlier", "30", *sizes, "--out", str(out)])
    study_quantize.main()
    written = json.loads(out.read_text(encoding="utf-8"))
    assert [row["method"] for row in written["results"]] == ["rtn", "rtn", "gptq", "gptq"]
    assert written["model"] == "random, 1 layers, outliers x 30"
    assert study_quantize.page([written]) in capsys.readouterr().out
