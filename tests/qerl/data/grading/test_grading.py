"""Grading: near misses labelled by hand, worked solutions, hostile completions, and the workers for formulas."""

import json
import os
import random
import resource
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import pytest

from qerl.data.formulas.number import parse_number
from qerl.data.grading import math_pool
from qerl.data.grading.extract import MAX_COMPLETION_CHARS, NOTHING, extract
from qerl.data.grading.grade import compare, grade, grade_many
from qerl.data.grading.math_pool import VERDICTS
from qerl.data.tasks import get_task

HERE = Path(__file__).parents[3]
TASKS = {"number": get_task("gsm8k"), "math": get_task("math500")}
# kind -> [{"answer": ..., "correct": [completions], "wrong": [...], "no_answer": [...], ...}], labelled by hand
TABLE = json.loads((HERE / "golden" / "grading.json").read_text(encoding="utf-8"))
ENTRIES = [(kind, entry) for kind, entries in TABLE.items() for entry in entries]
SOLUTIONS = [json.loads(line) for line in (HERE / "data" / "gsm8k" / "test.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize(("kind", "entry"), ENTRIES, ids=[f"{kind}-{entry['answer']}" for kind, entry in ENTRIES])
def test_grades_agree_with_the_labels(kind, entry):
    labelled = [(text, label) for label, texts in entry.items() if label != "answer" for text in texts]
    grades = grade_many(TASKS[kind], [text for text, _ in labelled], [entry["answer"]] * len(labelled))
    differing = [(text, label, g) for (text, label), g in zip(labelled, grades, strict=True) if g.reason != label]
    assert not differing
    assert all(g.correct == (g.reason == "correct") for g in grades)


@pytest.mark.parametrize("row", SOLUTIONS, ids=lambda row: row["answer"])
def test_a_worked_solution_is_right_only_for_its_own_answer(row):
    task = TASKS["number"]
    assert grade(task, row["solution"], row["answer"]).correct
    for wrong in (int(row["answer"]) + 1, int(row["answer"]) - 1, int(row["answer"]) * 10, f"{row['answer']}.5"):
        assert grade(task, row["solution"], str(wrong)).reason == "wrong"


def test_a_truncated_solution_is_never_right_by_chance():
    """Before the answer line is complete, it states nothing, or only the first digits of the number."""
    for row in SOLUTIONS:
        start = row["solution"].rindex("####")
        assert all(
            grade(TASKS["number"], row["solution"][:end], row["answer"]).reason == "no_answer" for end in range(start)
        )


SPELLINGS = (
    "{n}", "{n}.0", "{n}.", "+{n}", "0{n}", "${n}", "{n} dollars", "{n}\\text{{ cm}}", "x = {n}", "{n:,}", "({n})",
    "\\frac{{{n}}}{{1}}", "{n}%", "\\textbf{{{n}}}", "{n}.00", "{n}e0", "{n:,}.0", "$${n}$$", "{n} miles per hour",
)  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_states_its_number_and_no_other(spelling):
    rng = random.Random(spelling)
    for _ in range(30):
        n = rng.randrange(10 ** rng.randrange(1, 9))
        other = rng.choice([n + 1, n - 1, 10 * n + 10, n + 1000, -n - 1])
        completion = f"\\boxed{{{spelling.format(n=n)}}}"
        assert grade(TASKS["number"], completion, str(n)).reason == "correct", completion
        assert grade(TASKS["number"], completion, str(other)).reason == "wrong", completion
        assert grade(TASKS["math"], completion, str(n)).reason == "correct", completion


def test_equality_of_numbers_is_exact_and_symmetric():
    rng = random.Random(0)
    values = [Fraction(rng.randrange(-50, 50), rng.randrange(1, 9)) for _ in range(60)]
    for one in values:
        for other in values:
            mine, theirs = parse_number(f"{one}"), parse_number(f"{other}")
            assert mine.value == one
            assert mine.equals(theirs) == theirs.equals(mine) == (one == other)


def test_decimals_are_not_rounded():
    assert compare("0.1", "0.10", "number") == "correct"
    assert compare("0.30000000000000004", "0.3", "number") == "wrong"
    assert compare("100000000000000000001", "100000000000000000000", "number") == "wrong"


def test_a_number_that_is_not_marked_is_no_answer():
    task, text = TASKS["number"], "She has 16 - 3 = 13, so she makes $26 in 2 days, or $1,300."
    assert grade(task, text, "1300").reason == "no_answer"
    assert grade(task, "It is \\boxed{5} and not 6", "5").correct
    assert grade(task, "It is \\boxed{5", "5").reason == "no_answer", "a box that is cut off states nothing"
    assert grade(task, "nothing", "5").reason == "no_answer"


HOSTILE = {
    "brackets": "{" * 1_900_000, "open boxes": "\\boxed{" * 250_000, "empty boxes": "\\boxed{}" * 230_000,
    "boxes without content": "\\boxed" * 300_000, "box of brackets": "\\boxed{" + "{" * 1_800_000,
    "deep nesting": "\\boxed{" + "{" * 900_000 + "18" + "}" * 900_000 + "}",
    "fractions": "\\boxed{" + "\\frac{1}{" * 200_000, "backslashes": "\\boxed{" + "\\" * 1_900_000,
    "dollars": "$" * 1_900_000, "hashes": "####" * 480_000, "hashes and numbers": "#### 1 2\n" * 200_000,
    "mentions": "the answer is " * 130_000, "mention and spaces": "the answer is" + " " * 1_800_000,
    "long number": "the answer is " + "1" * 1_800_000, "open tags": "<answer>" * 230_000,
    "closed tags": "</answer>" * 200_000, "thoughts": "</think>" * 230_000, "arabic digits": "١" * 1_900_000,
    "invisible": "\u200b" * 1_900_000, "null bytes": "\\boxed{" + "\0" * 900 + "}",
    "lone surrogates": "\\boxed{\ud800}" * 1000, "newlines": "\n" * 1_900_000,
    "many in one box": "\\boxed{" + "1, " * 300 + "}", "too long for one": "x" * (MAX_COMPLETION_CHARS + 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["number", "math"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_completions_are_refused_within_a_second(name, kind):
    started = time.process_time()
    result = grade(TASKS[kind], HOSTILE[name], "18")
    assert not result.correct
    assert time.process_time() - started < 1


FORMULAS = {
    "tower": "9^{9^{9^{9}}}", "factorial": "(10^6)!", "binomial": "\\binom{10^9}{5\\cdot 10^8}",
    "expansion": "(x+y+z)^{200}", "sum": "\\sum_{n=1}^{10000000} \\frac{\\sin n}{n}", "powers": "x" + "^x" * 400,
    "nesting": "(" * 400 + "1" + ")" * 400, "sines": "\\sin(" * 150 + "x" + ")" * 150, "bars": "|" * 300,
    "terms": "1" + "+1" * 499, "factors": "x" * 900, "quotients": "1" + "/1" * 499,
    "commands": "\\left" * 150, "quotes": "5" + "!" * 100, "surrogate": "x\ud800", "null": "x\0",
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_hostile_formulas_get_a_verdict_in_time(name):
    math_pool.compare("x", "y")  # start a worker
    started = seconds_of_processor()
    assert compare(FORMULAS[name], "\\frac{\\pi}{2}", "math") in ("timeout", "unparsable", "wrong")
    assert seconds_of_processor() - started < 1.5  # the worker's limit, and what this process reads before


def seconds_of_processor():
    """Processor time of this process and its workers, with those of their children that have ended."""
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ours.ru_utime + ours.ru_stime
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def test_after_a_hostile_formula_other_verdicts_are_the_same_as_before():
    assert math_pool.compare("2\\sqrt{3}", "\\sqrt{12}") == "equal"
    math_pool.compare("18", "9^{9^{9^{9^{9}}}}")
    math_pool.known.clear()
    assert math_pool.compare("2\\sqrt{3}", "\\sqrt{12}") == "equal"
    assert math_pool.compare("2\\sqrt{3}", "\\sqrt{13}") == "different"


def test_formulas_are_compared_from_any_thread():
    pairs = [(f"x+{n}", f"{n}+x") for n in range(12)] + [(f"x+{n}", f"x+{n + 1}") for n in range(12)]
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda pair: math_pool.compare(*pair), pairs))
    assert verdicts == ["equal"] * 12 + ["different"] * 12
    assert set(verdicts) < set(VERDICTS)


def test_a_worker_that_hangs_is_replaced(monkeypatch):
    processes, begin, limit_s = [], subprocess.Popen, math_pool.REPLY_LIMIT_S

    def begin_and_note(*args, **options):
        monkeypatch.setattr(math_pool, "REPLY_LIMIT_S", limit_s)  # for the worker that replaces it
        processes.append(begin(*args, **options))
        return processes[-1]

    math_pool.close()
    math_pool.known.clear()
    monkeypatch.setattr(subprocess, "Popen", begin_and_note)
    assert math_pool.compare("x+y", "y+x") == "equal"
    processes[0].send_signal(signal.SIGSTOP)
    monkeypatch.setattr(math_pool, "REPLY_LIMIT_S", 0.2)
    assert math_pool.compare("x+y+1", "1+y+x") == "equal"
    assert processes[0].wait(60) == -signal.SIGKILL
    assert math_pool.compare("x+y+2", "2+y+x") == "equal"
    assert len(processes) == 2
    assert processes[1].poll() is None
    math_pool.close()
    assert processes[1].wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("before", ["", "İ", "İ" * 9, "ß", "\u200b"])
def test_tags_are_found_after_letters_that_become_longer_in_lower_case(before):
    assert extract(f"{before}<Answer>18</ANSWER> so <answer>19", "number").text == "18"


def test_extraction_looks_first_after_the_thought():
    assert extract("<think>\\boxed{1}</think>\\boxed{2}", "number").text == "2"
    assert extract("<think>\\boxed{1}</think>done", "number").text == "1"
    assert extract("done", "number") == NOTHING
