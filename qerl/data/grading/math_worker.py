"""The process that compares answers as mathematics. qerl/data/grading/math_pool.py starts it and writes one request per
line.

It runs as a script of its own instead of through multiprocessing, so that it neither imports nor inherits anything of
its parent (main module, CUDA, threads). It imports math-verify once and forks a child for each request, so that

1. a hostile answer costs at most CPU_LIMIT_S of processor time and MEMORY_LIMIT_BYTES: the kernel's timer ends the
   child wherever it is (math-verify's own limits are switched off: they use SIGALRM, which counts the time of the wall
   clock, works only in a main thread, and not within one long multiplication);
2. the verdict on a pair depends neither on what was compared before nor on how busy the machine is.

A request is {"gold": str, "answer": str}; the reply on the standard output is one of VERDICTS.
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

# Compared before the first fork, because the LaTeX parser builds its tables and sympy imports its modules only when
# they are needed, and each child would have to do so again.
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
    """What math-verify reads in a formula: its expressions, then the text itself; nothing if it has no expressions."""
    from math_verify import LatexExtractionConfig, parse

    parsed = parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
    return parsed if any(not isinstance(item, str) for item in parsed) else []


def compare(gold: str, answer: str) -> str:
    """One of VERDICTS: whether two formulas are equal as mathematics."""
    from math_verify import verify

    gold_parsed = parse_latex(gold)
    if not gold_parsed:
        return "bad_answer"
    answer_parsed = parse_latex(answer)
    if not answer_parsed:
        return "unparsable"
    return "equal" if verify(gold_parsed, answer_parsed, timeout_seconds=None) else "different"


def _answer_in_child(request: dict[str, str]) -> str:
    """The verdict of a child process, which the kernel ends when its time is up."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # nobody handles SIGPROF, so it ends the process
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
            verdict = compare(request["gold"], request["answer"])
        except BaseException:  # a hostile formula may raise anything, RecursionError and MemoryError included
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and then closes our input
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # math-verify prints errors, which must not mix with our replies
    for gold, answer in _WARM_UP:
        compare(gold, answer)
    gc.collect()
    gc.freeze()
    replies.write("ready\n")
    for line in sys.stdin:
        replies.write(_answer_in_child(json.loads(line)) + "\n")


if __name__ == "__main__":
    main()
