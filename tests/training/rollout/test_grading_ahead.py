"""Grading while the engine generates: runs give the same numbers with and without it, and nothing hangs."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
from small_run import numbers, same_adapters, small_config
from transformers import GenerationMixin

import training.parts
from qerl.data.grading import math_pool
from qerl.data.tasks import get_task, grade
from qerl.engine.interface import Completion
from qerl.engine.transformers.engine import TransformersEngine
from training.rollout.grading_ahead import THREAD, GradingAhead, grading_ahead
from training.run import start
from training.run_dir.log import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH = 2, 2
TASK = get_task("math500")
TEXTS = ("so \\boxed{12}", "so \\boxed{13}", "so \\boxed{14}")
FORMULA = "\\max(12, 0)"  # goes to a worker; whatever is simpler is compared at once


def formulas(folder, *overrides, out="run"):
    """A recipe on sums whose answers are formulas, so that the embedded model's numbers are compared by a worker."""
    path = folder / "formulas.jsonl"
    rows = islice(get_task("arith").generate("train"), 12)
    path.write_text(
        "".join(
            json.dumps({"question": row["question"], "answer": f"\\max({row['answer']}, 0)"}) + "\n" for row in rows
        )
    )
    settings = ("data.task=math500", "data.split=test", "data.prompt_template='{question}'", f"data.source={path}")
    settings += (f"rollout.batch_size={BATCH}", "rollout.max_new_tokens=32", "rewards=[{name: accuracy}]")
    settings += ("model.format=bf16", "run.micro_batch_tokens=1024")
    settings += ("loss.mismatch_gate=null",)  # else a trial adapter has completions that nobody grades
    settings += ("logging.completions_every=1", "logging.completions_count=8", "noise.enabled=false")
    return small_config("tiny", folder, *settings, *overrides, steps=STEPS, out=out)


@pytest.fixture
def compared(monkeypatch):
    """A list of (thread, gold, answer) for each comparison by a worker from now on. The engine is so slow that
    completions are graded before it goes on, except for the last batch."""
    math_pool.compare("x", "y")  # start a worker
    math_pool.forget()
    seen, in_worker, generate = [], math_pool._ask, TransformersEngine.generate

    def compare(gold, answer):
        seen.append((threading.current_thread().name, gold, answer))
        return in_worker(gold, answer)

    def slowly(engine, prompts, sampling, seed, finished, *place):
        def wait(index, completion):
            grading = finished(index, completion)
            if index < len(prompts) - BATCH:
                grading.result(120)

        return generate(engine, prompts, sampling, seed, finished and wait, *place)

    monkeypatch.setattr(math_pool, "_ask", compare)
    monkeypatch.setattr(TransformersEngine, "generate", slowly)
    return seen


def pairs(compared):
    """Count how often each (gold, answer) was compared, and empty the list."""
    counts = Counter(pair[1:] for pair in compared)
    compared.clear()
    return counts


def written(run_dir):
    return [path.read_text() for path in sorted((run_dir / "completions").iterdir())]


def test_a_run_is_the_same_with_and_without_grading_ahead(tmp_path, monkeypatch, compared):
    """Of each rollout of a step, where there are several."""
    overrides = ("rollout.dynamic_sampling.enabled=true", "rollout.dynamic_sampling.max_extra_rollouts=1")
    ahead = start(formulas(tmp_path, *overrides), "tiny")
    in_thread = sum(name.startswith(THREAD) for name, *_ in compared)
    asked = pairs(compared)
    assert len(asked) > 3
    assert set(asked.values()) == {1}  # never by both the thread and the reward
    assert in_thread > len(asked) / 2
    math_pool.forget()
    monkeypatch.setattr(training.parts, "grading_ahead", lambda *_: None)
    plain = start(formulas(tmp_path, *overrides, out="plain"), "tiny")
    assert pairs(compared) == asked  # the same texts are compared with the same answers
    assert numbers(ahead.run_dir) == numbers(plain.run_dir)
    assert written(ahead.run_dir) == written(plain.run_dir)
    assert same_adapters(ahead.adapter, plain.adapter)
    assert any(row["rewards/accuracy"] > 0 for row in numbers(plain.run_dir))
    shares = [row["speed/graded_ahead_share"] for row in read_metrics(ahead.run_dir)]
    assert len(shares) == STEPS
    assert any(row.get("dynamic_sampling/extra_rollouts") for row in numbers(ahead.run_dir))
    assert all(0.75 <= share <= 1 for share in shares)  # of 8 completions in batches of 2
    assert not any("speed/graded_ahead_share" in row for row in read_metrics(plain.run_dir))


def test_ctrl_c_in_a_rollout_ends_the_run_and_the_thread(tmp_path, monkeypatch, compared):
    sample, calls = GenerationMixin.generate, []

    def interrupted(*given, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sample(*given, **options)

    monkeypatch.setattr(GenerationMixin, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(formulas(tmp_path), "tiny")
    assert threads_end()


def threads_end():
    """Whether all grading threads end within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(thread.name.startswith(THREAD) for thread in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


class Words:
    """A tokenizer whose tokens are indices into TEXTS. It waits if it is told to."""

    def __init__(self):
        self.decoded, self.begun, self.go_on = [], threading.Event(), threading.Event()
        self.go_on.set()

    def __call__(self, ids):
        self.begun.set()
        assert self.go_on.wait(60)
        self.decoded.append(ids[0])
        return TEXTS[ids[0]]


def completions():
    return [Completion([index], [-1.0], "stop") for index in range(len(TEXTS))]


def tell_all(finished):
    for index, completion in enumerate(completions()):
        finished(index, completion)


def wait_for(ahead, graded):
    deadline = time.monotonic() + 60
    while ahead.graded < graded and time.monotonic() < deadline:
        time.sleep(0.01)


def test_the_reward_finds_the_verdicts_of_the_thread(compared):
    ahead = GradingAhead(TASK, Words())
    with ahead.rollout([FORMULA] * 3) as finished:
        tell_all(finished)
        wait_for(ahead, 3)
    assert (ahead.graded, len(compared)) == (3, 3)
    assert [grade(TASK, text, FORMULA).correct for text in TEXTS] == [True, False, False]
    assert len(compared) == 3


def test_the_reward_waits_for_grading_that_has_begun_and_does_the_rest_itself(monkeypatch):
    words, shut_down = Words(), ThreadPoolExecutor.shutdown

    def go_on_once_the_others_are_cancelled(pool, wait=True, **options):
        shut_down(pool, wait=False, **options)
        words.go_on.set()
        shut_down(pool, wait=wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", go_on_once_the_others_are_cancelled)
    words.go_on.clear()
    ahead = GradingAhead(TASK, words)
    with ahead.rollout(["1"] * 3) as finished:
        tell_all(finished)
        assert words.begun.wait(60)
        assert ahead.graded == 0
    assert (words.decoded, ahead.graded) == ([0], 1)
    with ahead.rollout([]):
        assert ahead.graded == 0  # in this rollout


def interrupted_rollout(ahead, begun):
    with ahead.rollout(["1"] * 3) as finished:
        tell_all(finished)
        begun.wait(60)
        raise KeyboardInterrupt


def test_after_an_error_in_the_rollout_nothing_is_waited_for():
    words = Words()
    words.go_on.clear()
    with pytest.raises(KeyboardInterrupt):
        interrupted_rollout(GradingAhead(TASK, words), words.begun)
    assert words.begun.is_set()
    assert words.decoded == []  # the thread still waits for `go_on`
    words.go_on.set()
    assert threads_end()
    assert words.decoded == [0]


def test_an_error_in_the_thread_does_not_end_the_run():
    def decode(ids):
        if ids == [1]:
            raise ValueError("no such token")
        return "so \\boxed{1}"

    ahead = GradingAhead(TASK, decode)
    with ahead.rollout(["1"] * 3) as finished:
        tell_all(finished)
        wait_for(ahead, 2)
    assert ahead.graded == 2


@pytest.mark.parametrize(
    ("task", "reward", "expected"),
    [
        ("math500", "accuracy", True),
        ("math500", "length", True),
        ("math500", "format", False),
        ("gsm8k", "accuracy", False),  # the answers are numbers
    ],
)
def test_it_is_on_if_rewards_compare_formulas(task, reward, expected):
    assert (grading_ahead([(get_task(task), ["soft_overlong", reward])], Words()) is not None) == expected


def test_the_share_of_completions_graded_ahead_is_explained():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert "`speed/graded_ahead_share`" in page


def test_completions_that_are_carried_over_are_graded_ahead_once_they_are_whole(tmp_path, monkeypatch):
    """Which prompts a rollout has shows only while it samples."""
    decoded, made = set(), grading_ahead

    def watched(sources, text):
        def decode(ids):
            decoded.add(said := text(ids))
            return said

        return made(sources, decode)

    monkeypatch.setattr(training.parts, "grading_ahead", watched)
    run = start(formulas(tmp_path, "rollout.batch_size=null", "rollout.carry_over=2"), "tiny").run_dir
    rows = [json.loads(line) for step in (1, 2) for line in (run / f"completions/step-{step:06d}.jsonl").open()]
    assert len(rows) == 16
    assert decoded <= {row["completion"] for row in rows}  # all that began is trained on in the end
    assert decoded
    assert any(row["carry_over/kept_tokens"] for row in read_metrics(run))
