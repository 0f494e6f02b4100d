"""An evaluation's folder and its numbers, from graded completions to the table that is shown.

    settings.json      identity of the evaluation (what decides its numbers), and the engine that runs it
    completions.jsonl  one line per completion; a batch is appended at once and flushed to the disk
    result.json        the fields of `EvalResult`, written last, whole or not at all

A killed evaluation leaves whole batches and at most one unfinished batch. That one is dropped and sampled again with
the same seed, so that a continued evaluation gives the numbers of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from qerl.base.errors import CheckpointError
from qerl.base.files import JSON_BYTES, parse_json, read_text, replace_text
from qerl.data.grading.intervals import MANY_SAMPLES, ONE_SAMPLE, Estimate, estimate, pass_at_k

SETTINGS, COMPLETIONS, RESULT = "settings.json", "completions.jsonl", "result.json"

Row = dict[str, Any]
Key = tuple[int, int]  # (row of the data, sample)


class Store:
    """The folder of one evaluation, which one process holds. `open_store` makes it."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self._settings = settings

    def bind_engine(self, engine: Mapping[str, Any]) -> None:
        """Record which engine samples here. Raises CheckpointError if earlier batches came from another kernel."""
        earlier = self.engine
        if earlier is not None and earlier["kernel"] != engine["kernel"]:
            raise CheckpointError(
                f"{self.folder} was begun with {earlier['kernel']}, and {engine['kernel']} may sample other "
                "completions: continue on the machine where it began, give another --out, or --overwrite"
            )
        self._settings = {**self._settings, "engine": dict(engine)}
        write_json(self.folder / SETTINGS, self._settings)

    @property
    def engine(self) -> dict[str, Any] | None:
        """The engine that sampled the batches in this folder; None if there are none."""
        return self._settings.get("engine")

    def resume(self, batches: Sequence[Sequence[Key]]) -> list[Row]:
        """The rows of the whole batches in this folder; what follows them in the file is cut off.

        Raises CheckpointError if a line is not the one that belongs there by the plan of batches.
        """
        path = self.folder / COMPLETIONS
        path.touch()
        lines = path.read_bytes().split(b"\n")[:-1]  # the last piece is empty, or a line that was not finished
        whole = 0
        for batch in batches:
            if whole + len(batch) > len(lines):
                break
            whole += len(batch)
        else:
            if len(lines) > whole:
                raise self._foreign(whole + 1)
        keys = (key for batch in batches for key in batch)
        rows = [
            self._row(number, line, key) for number, (line, key) in enumerate(zip(lines[:whole], keys, strict=False), 1)
        ]
        with path.open("r+b") as file:
            file.truncate(sum(len(line) + 1 for line in lines[:whole]))
            os.fsync(file.fileno())
        return rows

    def append(self, rows: Sequence[Row]) -> None:
        """Add the rows of one batch and wait until they are on the disk. Raises CheckpointError if that fails."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path = self.folder / COMPLETIONS
        try:
            with path.open("ab") as file:
                file.write(text.encode("utf-8", errors="replace"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written ({error.strerror}): make room, then the same command continues"
            ) from error

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json, whole or not at all."""
        write_json(self.folder / RESULT, result)

    def _row(self, number: int, line: bytes, key: Key) -> Row:
        try:
            row = parse_json(line.decode("utf-8"))
        except ValueError as error:
            raise self._foreign(number) from error
        if not isinstance(row, dict) or (row.get("row"), row.get("sample")) != key:
            raise self._foreign(number)
        return row

    def _foreign(self, number: int) -> CheckpointError:
        return CheckpointError(
            f"line {number} of {self.folder / COMPLETIONS} was not written by this evaluation: give another --out, "
            "or --overwrite to begin anew"
        )


@contextlib.contextmanager
def open_store(folder: Path, identity: Mapping[str, Any], overwrite: bool) -> Iterator[Store]:
    """Make the folder of the evaluation `identity` (plain JSON values) or continue in it, and hold it.

    A failure before the first whole batch leaves nothing behind, and a later one leaves the whole batches. With
    `overwrite` the files of an earlier evaluation are removed. Raises CheckpointError if the folder holds another
    evaluation or something else, or if another process uses it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"--out {folder} cannot be made ({error.strerror}): give another folder") from error
    with _held(folder):
        settings = read_settings(folder)
        if settings is not None and overwrite:
            for name in (RESULT, COMPLETIONS, SETTINGS):
                (folder / name).unlink(missing_ok=True)
            settings = None
        identity = json.loads(json.dumps(identity))
        if settings is None:
            settings = {"identity": identity}
            write_json(folder / SETTINGS, settings)
        elif settings["identity"] != identity:
            raise CheckpointError(
                f"{folder} holds an evaluation with other settings ({differences(settings['identity'], identity)}): "
                "give another --out, or --overwrite to begin anew"
            )
        try:
            yield Store(folder, settings)
        except BaseException:
            _discard_empty(folder, made)
            raise


def _discard_empty(folder: Path, made: Sequence[Path]) -> None:
    """Remove the files of an evaluation without any completion, and the folders `made` for it (innermost first)."""
    completions = folder / COMPLETIONS
    if (folder / RESULT).exists() or (completions.exists() and completions.stat().st_size):
        return
    for name in (COMPLETIONS, SETTINGS):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        for path in made:
            path.rmdir()


def read_settings(folder: Path) -> dict[str, Any] | None:
    """settings.json of an evaluation's folder; None if that is empty. Raises CheckpointError for other folders."""
    if (folder / SETTINGS).is_file():
        with contextlib.suppress(ValueError):
            settings = parse_json(read_text(folder / SETTINGS, JSON_BYTES))
            read = settings if isinstance(settings, dict) else {}
            engine = read.get("engine", {"kernel": None})
            if isinstance(read.get("identity"), dict) and isinstance(engine, dict) and "kernel" in engine:
                return read
    elif all(path.name.startswith(".") for path in folder.iterdir()):
        return None
    raise CheckpointError(f"--out {folder} is not empty and holds no evaluation: give a new folder")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The entries that differ, as text: `samples 4, now 8; seed 0, now 1`."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return "; ".join(f"{key} {_short(old.get(key))}, now {_short(new.get(key))}" for key in keys)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` as JSON. A reader sees the old file or the new one, even after a power cut."""
    replace_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold an advisory lock on the folder, which the system releases when the process dies."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is evaluating in {folder}: wait for it, or give another --out"
            ) from error
        yield
    finally:
        os.close(handle)


UNPARSED = ("no_answer", "unparsable", "too_long")  # no answer could be read from the completion
OPTIONAL = ("mean_score", "mean_environment_reward")
RARE = ("unparsable", "too_long", "timeout", "bad_answer")  # the table names these only where they occur


@dataclass(frozen=True)
class Summary:
    """The numbers of an evaluation. Shares are of completions; `accuracy` is the mean over questions (mean@n)."""

    questions: int
    samples: int
    correct: int
    accuracy: Estimate
    interval: str  # how the intervals were made
    pass_at_k: dict[int, Estimate]
    truncated_share: float
    no_answer_share: float
    reasons: dict[str, int]  # completions by the reason of their grade (qerl.data.grading.grade.Reason)
    prompt_tokens: int
    completion_tokens: int
    seconds: float  # spent sampling and grading, over all sessions
    mean_score: float | None = None  # of a grader of the user's own, which may give numbers between 0 and 1
    mean_environment_reward: float | None = None  # of an evaluation by episodes

    @property
    def completions(self) -> int:
        return self.questions * self.samples


@dataclass(frozen=True, repr=False)
class EvalResult:
    """A finished evaluation, and the fields of result.json, from which reports are made.

    Shares are of completions, intervals are 95%:

        task, model, step                    name, one line, optimizer step of the checkpoint or null
        questions, samples, completions, correct
        accuracy {value, low, high}          mean over questions (mean@n); `interval` says how low and high were made
        pass_at_k {"4": {value, low, high}}  only for the k that were asked for
        mean_environment_reward              only of an evaluation against an environment
        mean_score                           only of a grader of the user's own
        truncated_share, no_answer_share, unparsed_share, reasons {reason: completions}
        prompt_tokens, completion_tokens, seconds, tokens_per_second
        base, adapter, format, data, system_prompt, prompt_template, settings, sampling, engine {name, kernel, versions}
        identity                             what decides the numbers: equal identities give equal rows

    `details` holds settings, model, engine, versions and identity, as plain JSON values.
    """

    task: str
    model: str
    out: Path
    summary: Summary
    details: dict[str, Any]

    def __repr__(self) -> str:
        """One line: what was measured, on what, and where it is."""
        summary = self.summary
        asked = f"{summary.questions} questions" + (f", {summary.samples} samples each" if summary.samples > 1 else "")
        found = {"accuracy": summary.accuracy, **{f"pass@{k}": value for k, value in summary.pass_at_k.items()}}
        said = ", ".join(f"{name} {one.value:.1%} ({one.low:.1%} to {one.high:.1%})" for name, one in found.items())
        return f"EvalResult({self.task}, {self.model}: {said}, {asked}, in {str(self.out)!r})"

    def to_json(self) -> dict[str, Any]:
        summary = self.summary
        return {
            "task": self.task,
            "model": self.model,
            **{name: value for name, value in asdict(summary).items() if name not in OPTIONAL or value is not None},
            "completions": summary.completions,
            "unparsed_share": sum(summary.reasons.get(reason, 0) for reason in UNPARSED) / summary.completions,
            "pass_at_k": {str(k): asdict(value) for k, value in summary.pass_at_k.items()},
            "tokens_per_second": _rate(summary),
            **self.details,
        }


def summarize(rows: Sequence[Row], pass_k: Sequence[int] = ()) -> Summary:
    """The numbers of rows, of which every question needs the same number of samples. Raises ValueError otherwise."""
    correct_Q: dict[int, list[bool]] = {}
    for row in rows:
        correct_Q.setdefault(row["row"], []).append(row["correct"])
    samples, *others = {len(graded) for graded in correct_Q.values()}
    if others:
        raise ValueError(f"questions with {[samples, *others]} samples: every question needs the same number")
    hits_Q = [sum(graded) for graded in correct_Q.values()]
    seconds_of_batch = {row["batch"]: row["batch_seconds"] for row in rows}
    return Summary(
        questions=len(hits_Q),
        samples=samples,
        correct=sum(hits_Q),
        accuracy=estimate([hits / samples for hits in hits_Q]),
        interval=ONE_SAMPLE if samples == 1 else MANY_SAMPLES,
        pass_at_k={k: estimate([pass_at_k(samples, hits, k) for hits in hits_Q]) for k in pass_k},
        truncated_share=sum(row["truncated"] for row in rows) / len(rows),
        no_answer_share=sum(row["reason"] == "no_answer" for row in rows) / len(rows),
        reasons=dict(sorted(Counter(row["reason"] for row in rows).items())),
        prompt_tokens=sum(row["prompt_tokens"] for row in rows),
        completion_tokens=sum(row["tokens"] for row in rows),
        seconds=sum(seconds_of_batch.values()),
        mean_score=_mean(rows, "score"),
        mean_environment_reward=_mean(rows, "environment_reward"),
    )


def render_table(results: Sequence[EvalResult], names: Sequence[str] | None = None) -> Table:
    """A table for the terminal with one column per result, under `names` (default: what was evaluated)."""
    table = Table(title=" / ".join(dict.fromkeys(result.task for result in results)), box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in names or [result.model.partition(", ")[0] for result in results]:
        table.add_column(name, justify="right", overflow="fold")
    columns = [_cells(result.summary) for result in results]
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "") for column in columns))
    return table


def _cells(summary: Summary) -> dict[str, str]:
    mean = "accuracy" if summary.samples == 1 else f"accuracy (mean@{summary.samples})"
    own = {"mean score": summary.mean_score, "environment's reward": summary.mean_environment_reward}
    rare = {name: count / summary.completions for name, count in summary.reasons.items() if name in RARE}
    return {
        mean: f"{summary.accuracy.value:.1%}",
        "95% interval": _interval(summary.accuracy),
        **{f"pass@{k}": f"{e.value:.1%}  ({_interval(e)})" for k, e in summary.pass_at_k.items()},
        **{name: f"{value:.3f}" for name, value in own.items() if value is not None},
        "correct": f"{summary.correct} of {summary.completions}",
        "truncated": f"{summary.truncated_share:.1%}",
        "no answer": f"{summary.no_answer_share:.1%}",
        **{name.replace("_", " "): f"{share:.1%}" for name, share in rare.items()},
        "tokens per completion": f"{summary.completion_tokens / summary.completions:.1f}",
        "seconds": f"{summary.seconds:.1f}",
        "tokens per second": f"{_rate(summary):.0f}",
    }


def _interval(value: Estimate) -> str:
    return f"{value.low:.1%} to {value.high:.1%}"


def _mean(rows: Sequence[Row], key: str) -> float | None:
    """The mean of a field that only some evaluations have."""
    return sum(row[key] for row in rows) / len(rows) if key in rows[0] else None


def _rate(summary: Summary) -> float:
    return summary.completion_tokens / summary.seconds if summary.seconds else 0.0
