"""scripts/bench/so_far.py leaves the complete steps of a run that is cut off."""

import json

from scripts.bench.so_far import SoFar


def test_the_file_has_the_complete_steps_at_any_time_and_all_at_the_end(tmp_path):
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "out.json"
    with SoFar({"command": "c"}, metrics, out) as so_far:
        so_far.write()
        assert not out.exists()
        metrics.write_text('{"step": 1}\n{"step"')
        so_far.write()
        assert json.loads(out.read_text()) == {"command": "c", "unfinished": True, "steps": [{"step": 1}]}
        metrics.write_text('{"step": 1}\n{"step": 2}\n')
    assert [step["step"] for step in json.loads(out.read_text())["steps"]] == [1, 2]


def test_a_measurement_without_a_file_writes_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with SoFar({}, tmp_path / "metrics.jsonl", None):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
