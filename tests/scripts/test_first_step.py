"""scripts/study/first_step.py: on ties a step of any size changes as much, off them and in bfloat16 it does not."""

import first_step


def test_only_masters_on_ties_are_moved_far_by_a_tiny_step(monkeypatch):
    monkeypatch.setattr(first_step, "RATES", (1e-7, 1e-5))
    study = first_step.Study("qerl/tiny", "arith", batch=4, held_out=4)
    rows = {(row["masters"], row["direction"], row["rate"]): row for row in study.rows()}
    assert len(rows) == 3 * 2 * 2
    on = [rows["16-bit weights", "gradient", rate] for rate in first_step.RATES]
    assert on[0]["changed_share"] > 0.02
    assert on[0] == {**on[1], "rate": 1e-7}  # a hundred times the rate changes no more
    for masters in ("off ties", "bfloat16 masters"):
        small, large = (rows[masters, "gradient", rate] for rate in first_step.RATES)
        assert small["changed_share"] < 1e-4 < large["changed_share"] < 0.01
        assert small["kl_before_after"] < 1e-5 < on[0]["kl_before_after"]
    report = {"kl_to_teacher_before": study.before, "rows": list(rows.values())}
    assert "| off ties | random | 1e-05 |" in first_step.table(report)
