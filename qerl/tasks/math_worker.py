"""The process that compares answers as mathematics: started by qerl/tasks/math_pool.py, one request a line.

It runs as a file of its own, not through multiprocessing: nothing of the parent (its main module, CUDA, threads) is
imported or inherited. It imports math-verify once and forks a child for each request, so that

1. a hostile answer costs its child at most CPU_LIMIT_S of processor time and MEMORY_LIMIT_BYTES, and the kernel's timer
   ends it wherever it is (math-verify's own limit is SIGALRM: it acts in a main thread only, and not within one long
   multiplication);
2. the verdict on a pair does not depend on what was compared before, nor on how busy the machine is.

Request: {"gold": str, "answer": str}. Reply: one of VERDICTS, on the standard output.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys

CPU_LIMIT_S = 0.6  # the slowest honest comparison in the tests takes 0.2
MEMORY_LIMIT_BYTES = 2 * 2**30
VERDICTS = ("equal", "different", "unparsable", "bad_answer", "timeout")

# Compared before the first fork: the LaTeX parser builds its tables, and sympy imports its parts, as they are needed.
_WARM_UP = (
    (r"\frac{1}{2}+\pi", r"2\sqrt{3}"),
    (r"\sqrt{2}", "1.414"),
    (r"(1,2)", r"(2,1,\frac{\pi}{2})"),
    (r"[0,1)\cup(2,\infty)", r"(0,1)\cup[2,\infty)"),
    (r"[0,1]", r"0\le x\le 2"),
    (r"\{1,2\}", "1,3"),
    ("x^2+2x+1", "(x+1)^2+y"),
    ("y=5x", "y=6x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    ("6-5i", "6+5i"),
    (r"\text{Evelyn}", "Ben"),
    (r"\log_2 8+\sin x", r"\binom{5}{2}+10!"),
)


def parse_latex(text: str) -> list:
    """What math-verify reads in a formula: expressions, and the text itself last; without expressions, nothing."""
    from math_verify import LatexExtractionConfig, parse

    parsed = parse(f"${text}$", extraction_config=[LatexExtractionConfig()])
    return parsed if any(not isinstance(item, str) for item in parsed) else []


def compare(gold: str, answer: str) -> str:
    """One of VERDICTS: whether two formulas are equal as mathematics."""
    from math_verify import verify
    from sympy import And, Set
    from sympy.core.relational import Relational

    gold_parsed = parse_latex(gold)
    if not gold_parsed:
        return "bad_answer"
    answer_parsed = parse_latex(answer)
    if not answer_parsed:
        return "unparsable"
    if verify(gold_parsed, answer_parsed):
        return "equal"
    # math-verify turns an inequality into the interval it describes only if the gold answer is the inequality.
    if isinstance(gold_parsed[0], Set) and isinstance(answer_parsed[0], Relational | And):
        return "equal" if verify(answer_parsed, gold_parsed) else "different"
    return "different"


def _answer_in_child(request: dict[str, str]) -> str:
    """The verdict, from a child that the kernel ends when its time is up."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # SIGPROF is not handled, so it ends the process
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
            verdict = compare(request["gold"], request["answer"])
        except BaseException:  # whatever a hostile formula raises, also RecursionError and MemoryError
            verdict = "unparsable"
        os.write(writer, verdict.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        verdict = pipe.read()
    os.waitpid(pid, 0)
    return verdict if verdict in VERDICTS else "timeout"


def main() -> None:
    """Serve requests until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes our input
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # math-verify prints its errors
    for gold, answer in _WARM_UP:
        compare(gold, answer)
    gc.collect()
    gc.freeze()
    replies.write("ready\n")
    for line in sys.stdin:
        replies.write(_answer_in_child(json.loads(line)) + "\n")


if __name__ == "__main__":
    main()
