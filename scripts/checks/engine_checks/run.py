"""Run checks one after another; what they find is in the report, and on disk, as soon as each has ended."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from scripts.bench.provenance import write

Check = Callable[[Any], dict[str, Any]]


def add_options(parser: argparse.ArgumentParser, checks: Iterable[Check]) -> None:
    """The options that `run` reads."""
    known = [check.__name__ for check in checks]
    parser.add_argument("--only", nargs="+", metavar="CHECK", choices=known, help=f"some of {', '.join(known)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a check counts as hung")


def watch(patience: float) -> None:
    """End the process with the stack of each thread unless this is called again within `patience` seconds."""
    faulthandler.dump_traceback_later(patience, exit=True)


def run(
    context: Any,
    checks: Iterable[Check],
    arguments: argparse.Namespace,
    kept: Callable[[str, dict[str, Any]], bool] = lambda name, found: True,
) -> NoReturn:
    """Print the report and exit: with 1 if a check raised, or if `kept(name, numbers)` is false for one."""
    report = context.report
    for check in checks:
        name = check.__name__
        if arguments.only and name not in arguments.only:
            continue
        watch(arguments.patience)
        started = time.monotonic()
        try:
            report[name] = check(context)
            good = kept(name, report[name])
        except Exception:
            good = False
            report[name] = {**report.get(name, {}), "error": traceback.format_exc(limit=-6)}
        if not good:
            report["failed"].append(name)
        report["seconds"][name] = round(time.monotonic() - started, 2)
        write(report, arguments.out)  # after each, in case that the next one hangs
    print(write(report, arguments.out))
    print("failed:", ", ".join(report["failed"]) or "nothing", file=sys.stderr)
    sys.exit(1 if report["failed"] else 0)
