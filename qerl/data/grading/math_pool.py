"""Comparing answers with math-verify in worker processes, within a limit of processor time, from any thread.

Only what qerl/data/formulas/equality.py does not decide itself comes here. Up to MAX_WORKERS workers (see
qerl/base/isolate.py) do one comparison at a time each. A worker imports math-verify once and forks a child for each
request, so that

1. a hostile answer costs at most CPU_LIMIT_S of processor time and MEMORY_LIMIT_BYTES: the kernel's timer ends the
   child wherever it is (math-verify's own limits are switched off: they use SIGALRM, which counts the time of the wall
   clock, works only in a main thread, and not within one long multiplication);
2. the verdict on a pair depends neither on what was compared before nor on how busy the machine is.
"""

import gc
import logging
import os
import resource
import signal

from qerl.base.isolate import OwnFunctionError, Workers, serve

log = logging.getLogger(__name__)

MAX_WORKERS = min(8, os.cpu_count() or 1)
# The worker limits processor time itself. This limit is only for a worker that hangs without using any: it is so long
# that a busy machine does not reach it.
REPLY_LIMIT_S = 120.0
CACHE_SIZE = 20_000  # pays off because the completions of one prompt mostly state the same few answers
_ATTEMPTS = 2
CPU_LIMIT_S = 0.6  # the slowest honest comparison in the tests takes 0.2
MEMORY_LIMIT_BYTES = 2 * 2**30
VERDICTS = ("equal", "different", "unparsable", "bad_answer", "timeout")

_workers = Workers("compares formulas", __name__, needs="math_verify", most=MAX_WORKERS)


known: dict[tuple[str, str], str] = {}  # verdicts on pairs


def compare(gold: str, answer: str) -> str:
    """Whether two formulas are equal as mathematics: one of VERDICTS. Thread-safe.

    Only "equal" and "different" are kept for the next time: a timeout may be the machine's fault, not the formula's.
    """
    if (verdict := known.get((gold, answer))) is not None:
        return verdict
    verdict = ask(gold, answer)
    if verdict in ("equal", "different"):
        if len(known) >= CACHE_SIZE:
            known.clear()
        known[gold, answer] = verdict
    return verdict


def ask(gold: str, answer: str) -> str:
    for _ in range(_ATTEMPTS):
        try:
            return _workers.ask({"gold": gold, "answer": answer}, REPLY_LIMIT_S)["verdict"]
        except OwnFunctionError:
            log.warning("the process that compares formulas gave no verdict on %r and is replaced", answer[:80])
    return "timeout"


def close() -> None:
    """End this process's workers; the next comparison starts new ones."""
    _workers.close()


# What follows runs in a worker.

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


def verdict_on(gold: str, answer: str) -> str:
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
            verdict = verdict_on(request["gold"], request["answer"])
        except BaseException:  # a hostile formula may raise anything, RecursionError and MemoryError included
            verdict = "unparsable"
        os.write(writer, verdict.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        verdict = pipe.read()
    os.waitpid(pid, 0)
    return verdict if verdict in VERDICTS else "timeout"


def main(descriptor: int) -> None:
    """Answer requests until the other end is closed."""
    for gold, answer in _WARM_UP:
        verdict_on(gold, answer)
    gc.collect()
    gc.freeze()
    serve(descriptor, lambda request: {"verdict": _answer_in_child(request)})
