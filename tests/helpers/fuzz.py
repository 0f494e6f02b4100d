"""Damage files one by one, and let everything that reads them read them, in a process of its own.

It writes one JSON line to PROGRESS before each damaged file and one for each finding: an error that is not one line for
the user. A reader that takes more than CPU_S is interrupted; one that cannot be interrupted ends this process, as does
one that takes more than MEMORY_BYTES, and the parent counts that as a finding too.
"""

import contextlib
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path

from tests.helpers.mutations import mutated

MEMORY_BYTES = 2 * 2**30  # beside what a process takes that has read the sound files
CPU_S = 20


class HangError(BaseException):
    pass


def command(*arguments):
    from qerl.cli.main import app
    from qerl.cli.terminal import run_command

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            run_command(app, list(map(str, arguments)))
        except SystemExit as ended:
            if ended.code not in (0, 1, 2):
                raise AssertionError(f"exit code {ended.code}") from ended
            if any(ord(each) < 32 and each not in "\n\t" for each in said.getvalue()):
                raise AssertionError("control characters") from ended


def shown(run, *compared):
    """What `qerl report` does; the curves, which take a second to draw, only where many files are tried."""
    from qerl.report.curves import curves
    from qerl.report.page import render_page, render_text
    from qerl.report.read import ComparedResult, read_evaluation, read_run

    found = read_run(run)
    both = tuple(read_evaluation(each, ComparedResult) for each in compared) or None
    render_page([found], both, None)
    render_text(found, both, None)
    if "QERL_TEST_MUTATIONS" in os.environ:
        curves([found]).savefig(run / "curves.png")


def continued(place):
    """What `qerl eval` reads of an evaluation that it continues."""
    from eval.result import open_store, read_settings

    read_settings(place)
    with open_store(place, {"task": "arith"}, False) as store:
        store.resume([[(0, 0), (1, 0)], [(2, 0), (3, 0)]])


def of_tokenizer(model):
    from transformers import PreTrainedConfig

    from qerl.checkpoint.load import end_token_ids, load_tokenizer
    from qerl.data.tasks import render_prompt

    tokenizer = load_tokenizer(model)
    end_token_ids(model, PreTrainedConfig(), tokenizer)
    render_prompt(tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "3+4?"}])


def read_model(folder):
    from qerl.checkpoint.load import load_model
    from qerl.checkpoint.source import read_source
    from qerl.plan.sizes import read_sizes

    model = folder / "model"
    yield lambda: read_sizes(str(model))
    yield lambda: read_source(str(model))
    yield lambda: load_model(model, "bf16")
    yield lambda: command("plan", "--model", model, "--recipe", "tiny")


def read_tokenizer(folder):
    yield lambda: of_tokenizer(folder / "model")


def read_recipe(folder):
    from qerl.config.recipe import load_recipe

    yield lambda: load_recipe(folder / "recipe.yaml")


def read_run(folder):
    from qerl.config.recipe import load_config
    from training.preflight.checks import check_resumed
    from training.run_dir.folder import read_about
    from training.run_dir.log import RunLog

    run = folder / "run"
    yield lambda: command("compare", run / "eval" / "before", run / "eval" / "after")
    yield from read_adapter(folder, run)
    yield lambda: (load_config(run / "config.yaml"), read_about(run), check_resumed(run))
    yield lambda: shown(run)
    yield lambda: RunLog(run, 5).start_at(3)


def read_evaluation(folder):
    before, after = (folder / "run" / "eval" / name for name in ("before", "after"))
    yield lambda: continued(after)
    yield lambda: shown(folder / "run", before, after)
    yield lambda: command("compare", before, after)


def read_adapter(folder, named=None):
    from qerl.checkpoint.adapter import read_fitting_adapter
    from qerl.checkpoint.resolve import resolve_model

    named = str(named or folder / "adapter")
    yield lambda: resolve_model(named)
    yield lambda: read_fitting_adapter(resolve_model(named).adapter, str(folder / "model"))


def read_written(folder):
    from qerl.checkpoint.folder import quantized_from
    from qerl.checkpoint.output import check_target

    yield lambda: quantized_from(folder / "written")
    yield lambda: check_target(folder / "written", folder / "model", overwrite=True)


def read_rows(folder):
    from qerl.data.examples import load_examples

    (file,) = (folder / "rows").iterdir()
    yield lambda: load_examples("arith", str(file))
    yield lambda: command("grade", "--task", "arith", file)


FILES = {  # what a group of files is called -> its folder in the corpus, its readers, the files
    "model": ("model", read_model, "config.json model.safetensors.index.json model-00001-of-00003.safetensors"),
    "tokenizer": (
        "model", read_tokenizer, "tokenizer.json tokenizer_config.json chat_template.jinja generation_config.json",
    ),
    "recipe": ("", read_recipe, "recipe.yaml"),
    "run": ("run", read_run, "config.yaml run.json metrics.jsonl warnings.jsonl completions/step-000004.jsonl"),
    "checkpoint": (
        "run/checkpoints/step-000004", read_run,
        "checksums.json adapter_config.json adapter_model.safetensors trainer_state.json",
    ),
    "evaluation": ("run/eval/after", read_evaluation, "settings.json result.json completions.jsonl"),
    "adapter": ("adapter", read_adapter, "adapter_config.json adapter_model.safetensors"),
    "quantized": ("written", read_written, "quantize_report.json"),
    "rows": ("data", read_rows, "rows.jsonl rows.json rows.csv rows.tsv rows.parquet rows.jsonl.gz"),
}  # fmt: skip
KINDS = {  # kind of file -> file in the corpus, its readers
    f"{group}: {name}": (f"{folder}/{name}".lstrip("/"), readers)
    for group, (folder, readers, names) in FILES.items()
    for name in names.split()
}


def copied(corpus, name, folder):
    """What the readers of a file need, in a folder of its own, and where the file is there."""
    if name.startswith("data/"):
        (folder / "rows").mkdir()
        return shutil.copy(corpus / name, folder / "rows")
    needed = {name.split("/")[0], *(["model"] if name.startswith(("adapter", "written", "run")) else [])}
    for each in needed:
        if (corpus / each).is_dir():
            shutil.copytree(corpus / each, folder / each)
        else:
            shutil.copy(corpus / each, folder / each)
    return folder / name


def finding(error):
    """What tells one mistake from another: the error, and the last lines of ours that it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/" not in frame.filename]
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    place = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own[-2:]))
    return f"{type(error).__name__}: {str(error)[:100]!r} at {place}"


def interrupt(number, frame):
    raise HangError("it takes too long")


def tried(readers, report, sound):
    from qerl.base.errors import QerlError

    for reader in readers:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            reader()
        except QerlError as error:
            if sound:
                report(finding(error))
        except BaseException as error:  # among them panics of libraries in Rust, which are no Exception
            report(finding(error))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def damage_one(corpus, kind, seed, report):
    name, readers = KINDS[kind]
    report()
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(copied(corpus, name, Path(temporary)))
        sound = seed.endswith(" 0")  # the first file of each kind is not damaged, and has to be read
        if not sound:
            file.write_bytes(mutated(file.name, file.read_bytes(), random.Random(seed)))
        os.chdir(temporary)
        tried(readers(Path(temporary)), lambda text: report(finding=text), sound)
        os.chdir("/")


def unlike(sound):
    """One sound file for each of the readers, which read the same as long as none is damaged, and each file of rows."""
    kept = {}
    for job, (kind, number) in sound:
        _, readers = KINDS[kind]
        kept.setdefault(kind if readers is read_rows else readers, (job, (kind, number)))
    return list(kept.values())


def write_line(log, job, seed, **said):
    log.write(json.dumps({"job": job, "seed": seed, **said}) + "\n")


def limit_memory():
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, resource.RLIM_INFINITY))


def damage(corpus, progress, seed, count, first, kinds):
    """Of each kind `count` files are damaged; `first` of all these are left out, except the sound ones, which come
    first. What the process says goes to a file beside `progress`."""
    import torch
    from huggingface_hub import constants

    os.dup2(os.open(progress.with_suffix(".errors"), os.O_WRONLY | os.O_CREAT), 2)
    constants.HF_HUB_OFFLINE = True
    torch.set_num_threads(1)
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, interrupt)
    jobs = list(enumerate((kind, number) for number in range(count) for kind in kinds))
    sound, damaged = unlike(jobs[: len(kinds)]), jobs[max(first, len(kinds)) :]
    with open(progress, "a", buffering=1) as log:
        for part in (sound, damaged):
            for job, (kind, number) in part:
                report = partial(write_line, log, job, f"{kind} {number}")
                damage_one(corpus, kind, f"{seed} {kind} {number}", report)
            limit_memory()  # only now: the sound files have made every reader import and start what it needs
        log.write(json.dumps({"done": True}) + "\n")
