"""Ranks that talk to each other on a CPU: as processes, as torchrun starts them, and as threads where these suffice."""

import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qerl.base.errors import ConfigError, DataError, ParallelError
from qerl.base.parallel import Parallel, check_same, open_parallel
from tests.helpers.ranks import torchrun
from tests.helpers.run_process import ended, forked


def launched():
    """The launcher's variables for each of two ranks."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def in_threads(run, **options):
    """What `run(parallel)` returned or raised on each of two ranks."""

    def rank(environ):
        try:
            with open_parallel(environ, **options) as parallel:
                return run(parallel)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, launched()))


def in_processes(program, tmp_path):
    """(exit code, output) of each of two ranks."""
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | variables | {"PYTHONPATH": os.getcwd()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in launched()
    ]
    outputs = [process.communicate(timeout=240)[0] for process in ranks]
    return [(process.returncode, output) for process, output in zip(ranks, outputs, strict=True)]


def test_one_process_needs_neither_torch_nor_its_distribution():
    program = """
import sys
from qerl.base.parallel import open_parallel
with open_parallel({}) as parallel:
    parallel.barrier()
    print(parallel.first, parallel.size, parallel.gather("a"), parallel.broadcast("b"), parallel.sum_("tensor"))
print("torch" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.splitlines() == ["True 1 ['a'] b tensor", "False"]


def test_a_launched_world_of_one_is_one_process_and_leaves_no_variables():
    environ = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/root"}
    with open_parallel(environ) as parallel:
        assert parallel == Parallel()
    assert environ == {"HOME": "/root"}


def test_a_world_of_several_without_the_launchers_variables_is_refused():
    wanted = r"WORLD_SIZE is 4 and RANK is not set: start several processes with torchrun"
    with pytest.raises(ConfigError, match=wanted), open_parallel({"WORLD_SIZE": "4"}):
        pass


def test_two_ranks_sum_gather_broadcast_and_wait_and_a_killed_one_ends_the_other(tmp_path):
    program = """
import os, torch
from qerl.base.errors import ParallelError
from qerl.base.parallel import open_parallel
try:
    with open_parallel(time_limit_s=20) as parallel:
        rank = parallel.rank
        print(rank, parallel.size, parallel.local_rank, parallel.first, [name for name in os.environ if "RANK" in name])
        print(parallel.gather({"rank": rank, "text": "x" * (1 + 100_000 * rank)})[1]["text"].count("x"))
        print(parallel.broadcast(f"from {rank}"))
        value = torch.tensor([1.5, 10.0 * rank])
        print(parallel.sum_(value).tolist(), value.tolist(), flush=True)
        parallel.barrier()
        if rank == 1:
            os.kill(os.getpid(), 9)
        parallel.gather(0)
except ParallelError as error:
    print(error)
"""
    common = ["100001", "from 0", "[3.0, 10.0] [3.0, 10.0]"]
    (code_0, out_0), (code_1, out_1) = in_processes(program, tmp_path)
    assert (code_0, code_1) == (0, -9), out_0 + out_1
    *lines, last = out_0.splitlines()
    assert lines == ["0 2 0 True []", *common]
    assert last.startswith("another rank is gone, or did not answer in 20 s")
    assert re.search(r"\(\w.* \[?[0-9.]+\]?:\d+[^.]*\)$", last), last  # what gloo says happened, and no more
    assert out_1.splitlines() == ["1 2 1 False []", *common]


def test_ranks_that_do_not_all_come_are_one_error():
    with socket.socket() as taken:  # where nothing listens
        taken.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{taken.getsockname()[1]}"}
        variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **address}
        wanted = r"^rank 1 did not find all 2 processes at 127\.0\.0\.1:\d+: \w[^\n]*[^.]$"
        with pytest.raises(ParallelError, match=wanted), open_parallel(variables, time_limit_s=1):
            pass


@pytest.mark.parametrize(
    "call",
    [Parallel.barrier, lambda parallel: parallel.sum_(torch.ones(3)), lambda parallel: None],
    ids=["barrier", "sum", "end of the block"],
)
def test_an_exception_on_one_rank_reaches_the_other_at_its_next_call(call):
    def run(parallel):
        parallel.barrier()
        if parallel.rank == 1:
            raise DataError("row 7 has no answer")
        call(parallel)

    first, second = in_threads(run)
    assert isinstance(first, ParallelError)
    assert str(first) == "rank 1 failed: row 7 has no answer"
    assert isinstance(second, DataError)


def test_a_silent_rank_ends_the_other_after_the_time_limit():
    given_up = threading.Event()

    def run(parallel):
        if parallel.rank == 1:
            given_up.wait(30)
        try:
            parallel.barrier()
        finally:
            given_up.set()

    first, second = in_threads(run, time_limit_s=1)
    assert isinstance(first, ParallelError)
    assert str(first).startswith("another rank is gone, or did not answer in 1 s")
    assert isinstance(second, ParallelError)


def test_ranks_that_have_other_versions_are_refused():
    both = in_threads(
        lambda parallel: check_same(parallel, {"recipe": 1, "version of a package": {"torch": parallel.rank}})
    )
    assert {str(error) for error in both} == {
        "rank 1 has another version of a package than rank 0: give all processes the same command, the same files and "
        "the same packages"
    }


def test_a_sum_is_on_all_ranks_or_on_one_and_tensors_are_sent_from_any():
    parts = torch.randn(2, 101, generator=torch.Generator().manual_seed(0))

    def run(parallel):
        total = parallel.sum_(parts[parallel.rank].clone())
        part, packed = parts[parallel.rank].clone(), torch.full((3, 5), parallel.rank, dtype=torch.uint8)
        scales = torch.full((7,), parallel.rank + 0.5).to(torch.float8_e4m3fn)
        parallel.sum_to_(part, 1)
        parallel.send_([packed, scales, torch.empty(0)], 1)
        return part, packed.unique().tolist(), scales.float().unique().tolist(), total

    first, second = in_threads(run)
    assert torch.equal(second[0], parts.sum(0))
    assert first[1:3] == second[1:3] == ([1], [1.5])
    assert torch.equal(first[3], parts.sum(0))
    assert torch.equal(first[3], second[3])


def test_ranks_at_different_places_are_an_error_and_no_deadlock():
    def run(parallel):
        return parallel.sum_(torch.ones(2)) if parallel.rank else parallel.barrier()

    first, second = in_threads(run)
    assert str(first) == "rank 0 is at 'barrier' and another at 'sum of torch.float32 (2,)'"
    assert str(second) == "rank 1 is at 'sum of torch.float32 (2,)' and another at 'barrier'"


def test_launchers_of_two_hosts_start_ranks_beside_default_groups_of_their_own(tmp_path):
    """Each rank makes and destroys its own default group in torch, as vLLM does."""
    script = tmp_path / "program.py"
    program = f"""
import torch
import torch.distributed as dist
from qerl.base.parallel import open_parallel
with open_parallel() as parallel:
    place = parallel.rank, parallel.local_rank
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{{parallel.rank}}", rank=0, world_size=1)
    world = dist.get_world_size()
    dist.destroy_process_group()
    total = parallel.sum_(torch.tensor([parallel.rank + 1.0])).item()
    print(f"{{place}}: world {{world}}, sum {{total}}\\n", end="", flush=True)
"""
    script.write_text(program, encoding="utf-8")
    port = launched()[0]["MASTER_PORT"]
    hosts = []
    for rank in "01":
        words = ["--nnodes", "2", "--node-rank", rank, "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        hosts.append(forked(torchrun, [*words, str(script)], tmp_path / f"host-{rank}"))
    for host in hosts:
        with ended(host):
            pass
    said = [(tmp_path / f"host-{rank}").read_text() for rank in "01"]
    assert [host.exitcode for host in hosts] == [0, 0], said
    for rank, lines in enumerate(said):  # a launcher may add that the other one has ended before it
        assert f"({rank}, 0): world 1, sum 3.0" in lines
