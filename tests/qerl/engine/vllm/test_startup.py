"""The parts of a start, timed with clocks of our own; the sizes of CUDA graphs; first and second start compared."""

import time

import pytest
from bench_startup import ratios

from qerl.engine.vllm.startup import Parts, capture_sizes, line, split_compiling, whole


def test_parts_add_up_and_the_rest_is_named(monkeypatch):
    times = iter([0.0, 2.0, 2.5, 5.5, 6.0, 7.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    parts = Parts()
    for name in ("imports", "weights", "imports"):
        with parts.part(name):
            pass
    assert parts.seconds == {"imports": 3.0, "weights": 3.0}
    assert list(parts.seconds) == ["imports", "weights"]
    seconds = whole(10.0, parts.seconds, {"profile": 1.25})
    assert seconds == {"imports": 3.0, "weights": 3.0, "profile": 1.25, "rest": 2.75}
    assert line({**seconds, "device": 0.04}) == "imports 3.0, weights 3.0, profile 1.2, rest 2.8"


def test_a_part_that_fails_is_timed():
    parts = Parts()
    with pytest.raises(KeyError), parts.part("weights"):
        raise KeyError
    assert "weights" in parts.seconds


def test_compiling_is_separated_from_the_profile_run():
    assert split_compiling({"profile": 30.0, "weights": 5.0}, 26.0) == {"profile": 4.0, "weights": 5.0, "compile": 26.0}
    assert split_compiling({"profile": 3.0}, 3.5) == {"profile": 0.0, "compile": 3.0}  # measured by two clocks
    assert split_compiling({}, 0.0) == {"profile": 0.0, "compile": 0.0}


@pytest.mark.parametrize("sequences", [1, 3, 8, 100, 128, 256, 600])
def test_every_batch_has_a_graph_and_pads_little(sequences):
    sizes = capture_sizes(sequences)
    assert sizes[0] == 1
    assert sizes == sorted(set(sizes))
    assert sequences in sizes or sequences > 512
    assert sizes[-1] <= min(512, 2 * sequences)
    for tokens in range(1, min(sequences, 256) + 1):
        padded = next(size for size in sizes if size >= tokens)
        assert padded - tokens <= (4 if tokens <= 8 else 7 if tokens <= 48 else 15)


def test_no_graph_has_the_56_tokens_at_which_humming_is_wrong():
    assert 56 not in capture_sizes(128)


def test_there_are_about_half_as_many_graphs_as_in_vllm():
    vllm = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert len(capture_sizes(256)) <= 0.55 * len(vllm)


def test_the_ratio_is_the_first_over_the_last():
    starts = [
        {"process_s": 100.0, "startup_s": {"imports": 10.0, "compile": 70.0}},
        {"process_s": 50.0, "startup_s": {"imports": 10.0, "compile": 22.0}},
    ]
    assert ratios(starts) == {"engine_first_over_last": 2.5, "process_first_over_last": 2.0}
