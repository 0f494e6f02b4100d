"""Kernels are compiled in threads: once for all callers, with errors raised where the kernel is loaded.

A process that ends early must not crash. With the CUDA bindings NVRTC itself compiles, which needs no card.
"""

import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.formats.cuda import nvrtc
from qerl.formats.cuda.nvrtc import Jobs

HAS_NVRTC = find_spec("cuda") is not None and find_spec("cuda.bindings") is not None
VARIANT = ("shrink.cu", ("TILES=1", "WARPS=8", "BATCH=5"))
LONG_WAIT_S = 60.0  # for things that happen at once, so that a bug is a failure and not a hang


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """Compiled sources in an empty folder, on a Hopper card, by a stand-in for NVRTC. What was compiled stands in
    `seen`, and `refuses` holds the errors of the next times."""
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    monkeypatch.delenv("QERL_CAPABILITY", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    seen, refuses = [], []

    def compile_slowly(text, source, options):
        if refuses:
            raise refuses.pop()
        seen.append((source, tuple(options)))
        time.sleep(0.1)
        return repr((source, options)).encode()

    binaries = nvrtc.Binaries(compile_slowly, lambda: (13, 0))
    return SimpleNamespace(binaries=binaries, seen=seen, refuses=refuses)


def test_a_card_may_stand_in_for_another(cached, monkeypatch, caplog):
    """What is compiled then is code that the driver translates, in a file of its own, and the log says so once."""
    cached.binaries.get(*VARIANT)
    monkeypatch.setenv("QERL_CAPABILITY", "8.6")
    nvrtc.stood_for.cache_clear()
    cached.binaries.get(*VARIANT)
    assert nvrtc.capability() == (8, 6)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["QERL_CAPABILITY=8.6"]
    monkeypatch.setenv("QERL_CAPABILITY", "9")
    with pytest.raises(EngineError, match="write one such as"):
        nvrtc.capability()
    assert [options[0] for _, options in cached.seen] == [
        "--gpu-architecture=sm_90a",
        "--gpu-architecture=compute_86",
    ]


def in_threads(count, ask):
    """What `ask()` gives, or raises, in each of so many threads at the same time."""
    start, results = threading.Barrier(count), []

    def run():
        start.wait()
        try:
            results.append(ask())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_WAIT_S)
    return results


def test_a_kernel_that_several_threads_ask_for_at_once_is_compiled_once(cached, tmp_path):
    results = in_threads(4, lambda: cached.binaries.get(*VARIANT))
    assert len(cached.seen) == 1
    assert [path.read_bytes() for path in tmp_path.iterdir()] == results[:1]
    assert results == results[:1] * 4


def test_a_begun_compilation_is_waited_for_and_other_variants_have_other_files(cached, tmp_path):
    other = ("shrink.cu", ("TILES=2", "WARPS=8", "BATCH=5"))
    cached.binaries.begin([VARIANT, other, VARIANT])
    first, second = (cached.binaries.get(*variant) for variant in (VARIANT, other))
    assert first != second
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {first, second}
    cached.binaries.begin([VARIANT, other])  # both are in the cache already
    assert cached.binaries.get(*VARIANT) == first
    assert sorted(options[1] for _, options in cached.seen) == ["-DTILES=1", "-DTILES=2"]


def test_threads_do_begun_work_at_the_same_time(monkeypatch):
    """Each job waits for the other, so one after the other they would never end."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    meeting, jobs = threading.Barrier(2), Jobs()
    jobs.begin({name: lambda: meeting.wait(LONG_WAIT_S) for name in "ab"})
    assert sorted(jobs.result(name, pytest.fail) for name in "ab") == [0, 1]


def test_a_caller_does_not_wait_behind_other_jobs(monkeypatch):
    """A caller runs a job that no thread has begun, and no thread runs it again."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    release, at_end, done, jobs = threading.Event(), threading.Event(), [], Jobs()

    def asked():
        done.append(threading.current_thread())

    jobs.begin({"long": lambda: release.wait(LONG_WAIT_S), "asked": asked, "last": at_end.set})
    jobs.result("asked", pytest.fail)
    assert done == [threading.current_thread()]
    release.set()
    assert at_end.wait(LONG_WAIT_S)
    assert len(done) == 1


def test_an_error_of_a_thread_is_raised_where_the_kernel_is_loaded(cached):
    cached.refuses.append(EngineError("NVRTC cannot compile shrink.cu"))
    cached.binaries.begin([VARIANT])
    with pytest.raises(EngineError, match="cannot compile shrink"):
        cached.binaries.get(*VARIANT)
    assert cached.binaries.get(*VARIANT)  # another call compiles again, as without threads
    assert len(cached.seen) == 1


def test_an_error_reaches_every_waiting_caller():
    jobs, asked, calling = Jobs(), [], threading.Semaphore(0)

    class Name:
        def __hash__(self):  # a caller looks for the job of this name, and will wait for it
            calling.release()
            return 0

    def fails():
        asked.append(1)
        for _ in range(3):
            assert calling.acquire(timeout=LONG_WAIT_S)
        raise EngineError("no")

    name = Name()
    assert [str(error) for error in in_threads(3, lambda: jobs.result(name, fails))] == ["no"] * 3
    assert len(asked) == 1


@pytest.mark.gpu(instead=HAS_NVRTC)  # needs NVRTC alone; last run on 2026-11-21, on a CPU with NVRTC 13.0
@pytest.mark.usefixtures("cached")
def test_nvrtcs_own_error_is_raised_where_the_kernel_is_loaded():
    wrong = ("shrink.cu", ("TILES=none", "WARPS=8", "BATCH=5"))
    binaries = nvrtc.Binaries(nvrtc.compile_source, nvrtc.version)
    binaries.begin([wrong])
    with pytest.raises(EngineError, match=r"NVRTC cannot compile shrink\.cu .*TILES=none"):
        binaries.get(*wrong)


END_EARLY = """
import atexit, os, threading, time
from qerl.formats.cuda.nvrtc import Jobs

os.cpu_count = lambda: 1
begun, ending = threading.Event(), threading.Event()

def work():
    print("begun", flush=True)
    begun.set()
    ending.wait(60)
    time.sleep(0.3)
    print("ended", flush=True)

Jobs().begin(dict.fromkeys("abcd", work))
begun.wait(60)
atexit.register(ending.set)
raise SystemExit(3)
"""


def test_a_process_that_ends_waits_for_running_jobs_and_begins_no_others():
    done = subprocess.run([sys.executable, "-c", END_EARLY], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (3, ["begun", "ended"])


END_WHILE_NVRTC_RUNS = """
import torch
from qerl.formats.cuda import nvrtc
from qerl.formats.nvfp4 import gemm
torch.cuda.get_device_capability = lambda device: (9, 0)
nvrtc.compile_ahead(gemm.variants(3584, 18944))
"""


@pytest.mark.gpu(instead=HAS_NVRTC)  # needs NVRTC alone; last run on 2026-11-21, on a CPU with NVRTC 13.0
def test_a_process_may_end_while_nvrtc_compiles(tmp_path, monkeypatch):
    """Without waiting for the threads, the process died by a signal in 3 of 11 cases with NVRTC 13.0."""
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    command = [sys.executable, "-c", END_WHILE_NVRTC_RUNS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
