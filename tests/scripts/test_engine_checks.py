"""How checks of an engine are run: each leaves its numbers, also if a later one raises, and what fails is told."""

import argparse
import faulthandler
import json
from types import SimpleNamespace

import pytest
from engine_checks.run import add_options, run


def fine(context):
    return {"count": 0}


def wrong(context):
    return {"count": 3}


def raises(context):
    context.before = json.loads(context.out.read_text(encoding="utf-8"))
    raise ValueError("no card")


CHECKS = [fine, wrong, raises]


@pytest.fixture(autouse=True)
def unwatched():
    """The watch on hung checks would end the process of the tests later."""
    yield
    faulthandler.cancel_dump_traceback_later()


def report_of(tmp_path, *options):
    """The exit code, the report on disk and the context of a run with command-line options."""
    parser = argparse.ArgumentParser()
    add_options(parser, CHECKS)
    context = SimpleNamespace(report={"failed": [], "seconds": {}}, out=tmp_path / "report.json")
    arguments = parser.parse_args(["--out", str(context.out), *options])
    with pytest.raises(SystemExit) as ended:
        run(context, CHECKS, arguments, lambda name, found: found["count"] == 0)
    return ended.value.code, json.loads(context.out.read_text(encoding="utf-8")), context


def test_every_check_runs_and_what_failed_is_named(tmp_path):
    code, report, context = report_of(tmp_path)
    assert (code, report["failed"]) == (1, ["wrong", "raises"])
    assert report["wrong"] == {"count": 3}
    assert "ValueError: no card" in report["raises"]["error"]
    assert list(report["seconds"]) == ["fine", "wrong", "raises"]
    assert context.before["fine"] == {"count": 0}  # on disk before the next one began


def test_only_some_are_run(tmp_path):
    code, report, _ = report_of(tmp_path, "--only", "fine")
    assert (code, report["failed"], list(report["seconds"])) == (0, [], ["fine"])
