"""What scripts/checks/check_faults.py calls sound."""

import pytest

from scripts.checks.check_faults import FAULTS, fault_sound, kill_sound, summary

KILL = {"rank": 1, "after_step": 3, "others_stopped_s": 0.4, "exit_codes": [1, -9], "others_said": [["error: gone"]]}


@pytest.mark.parametrize(
    "changed",
    [{"others_stopped_s": 61.0}, {"exit_codes": [None, -9]}, {"exit_codes": [0, -9]}, {"others_said": [["a", "b"]]}],
    ids=["late", "hangs", "ends well", "two lines"],
)
def test_a_kill_is_sound_if_the_others_stop_in_time_with_one_line(changed):
    assert kill_sound(KILL)
    assert not kill_sound({**KILL, **changed})


def test_each_rank_of_a_host_says_one_line():
    kill = {**KILL, "others_said": [["error: gone (reset)", "error: gone (closed)"]]}
    assert kill_sound(kill, 2)
    assert not kill_sound(kill, 1)
    assert not kill_sound(KILL, 2)
    said = [[f"error: {FAULTS['NaN']}"] * 2, [f"error: rank 1 failed: {FAULTS['NaN']}"] * 2]
    assert fault_sound(FAULTS["NaN"], {"exit_codes": [1, 1], "said": said, "steps": 1}, 2)


def test_a_fault_is_sound_if_all_ranks_say_it():
    message = FAULTS["NaN"]
    fault = {"exit_codes": [1, 1], "said": [[f"error: {message}"], [f"error: rank 1 failed: {message}"]], "steps": 1}
    assert fault_sound(message, fault)
    assert not fault_sound(message, {**fault, "said": [[f"error: {message}"], ["error: rank 1 is gone"]]})
    found = {
        "ranks_per_launcher": None,
        "kills": [KILL],
        "faults": {"NaN": fault},
        "largest_difference": {"weights": 0.0},
    }
    assert summary(found).startswith("1 of 1 kills: the others stopped by themselves, the slowest in 0.4 s")
