"""Runs of several ranks, each in a process of its own, which talk over gloo on this machine."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from tests.helpers.run_process import forked, run_cli


def ranks(size, target, *arguments):
    """Started processes that run `target(environ, *arguments)` with the variables that a launcher gives each rank."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    return [forked(target, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, *arguments) for rank in range(size)]


def train(environ, recipe, output=None, resumed=None):
    """Train one rank, by the recipe or by its own of several; completions do not depend on which rank samples them.

    What it says goes to files in `output`. If that has a folder `host-RANK`, relative paths begin there.
    """
    say_to(output, environ)
    if output and (Path(output) / f"host-{environ['RANK']}").is_dir():
        os.chdir(Path(output) / f"host-{environ['RANK']}")
    from qerl.base.errors import QerlError
    from qerl.base.parallel import open_parallel
    from qerl.config.recipe import load_config
    from qerl.engine.transformers.engine import TransformersEngine
    from training.run import resume, start

    TransformersEngine.generate = drawn
    recipe = recipe if isinstance(recipe, str) else recipe[int(environ["RANK"])]
    try:
        with open_parallel(environ, time_limit_s=60) as parallel:
            if resumed is None:
                start(load_config(recipe), "tiny", parallel)
            else:
                resume(Path(resumed), parallel=parallel)
    except QerlError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def evaluate(environ, settings, output):
    """Evaluate as one rank; what it says goes to a file in `output`."""
    say_to(output, environ)
    from eval.run import run_eval
    from eval.settings import EvalSettings
    from qerl.base.errors import QerlError
    from qerl.base.parallel import open_parallel

    try:
        with open_parallel(environ, time_limit_s=60) as parallel:
            run_eval(EvalSettings(**settings), parallel=parallel)
    except QerlError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def command(environ, folder, arguments, output):
    """`qerl ARGUMENTS` in `folder`, with these variables."""
    os.environ |= environ
    os.chdir(folder)
    run_cli(arguments, output)


def say_to(output, environ):
    """Compute with one thread, and write what this rank says into a file in `output`, if that is given."""
    import torch

    torch.set_num_threads(1)
    if output is None:
        return
    descriptor = os.open(Path(output) / f"rank-{environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)


def drawn(engine, prompts, sampling, seed=None, finished=None, first_index=0):
    """In place of `Engine.generate`: completions that follow from the seed and the place in the whole batch.

    So do the choices of a mixture of experts; those for a prompt's tokens are the same for all of its completions.
    """
    import torch

    from qerl.engine.interface import Completion, request_seed
    from qerl.engine.transformers.sampling import blocks_of

    tokens, blocks, experts = [], blocks_of(engine.policy_model()), []
    for index in range(first_index, first_index + len(prompts)):
        generator = torch.Generator().manual_seed(request_seed(seed, index))
        length = int(torch.randint(2, sampling.max_new_tokens + 1, (1,), generator=generator))
        tokens.append(torch.randint(1, 40, (length,), generator=generator).tolist())
        prompt = prompts[index - first_index]
        shared = torch.Generator().manual_seed(sum(prompt))
        parts = [_choices(blocks, *part) for part in ((len(prompt), shared), (length - 1, generator))]
        experts.append(torch.cat(parts) if blocks else None)
    logprobs = engine.score(prompts, tokens, sampling.temperature)
    reasons = ["length" if len(ids) == sampling.max_new_tokens else "stop" for ids in tokens]
    done = [Completion(*one) for one in zip(tokens, logprobs, reasons, experts, strict=True)]
    for index, completion in enumerate(done):
        if finished is not None:
            finished(index, completion)
    return done


def _choices(blocks, tokens, generator):
    """uint8 (tokens, layers, k)."""
    import torch

    order = [torch.rand(tokens, block.experts.down_proj.experts, generator=generator) for block in blocks]
    ids = [each.topk(block.chosen).indices for each, block in zip(order, blocks, strict=True)]
    return torch.stack(ids, 1).to(torch.uint8) if ids else None


def alone(recipe, resumed=None):
    """Train in this process what one rank trains."""
    import torch

    from qerl.config.recipe import load_config
    from qerl.engine.transformers.engine import TransformersEngine
    from training.run import resume, start

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", drawn)
        start(load_config(recipe), "tiny") if resumed is None else resume(Path(resumed))


def torchrun(arguments, output):
    """What the command of this name does; what it and the ranks say goes to the file `output`."""
    from torch.distributed.run import main

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(descriptor, number)
    main(arguments)


def run(size, recipe, output=None, resumed=None):
    """Train with so many ranks to the end; returns the exit codes."""
    processes = ranks(size, train, str(recipe), output and str(output), resumed and str(resumed))
    for process in processes:
        process.join(180)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def rows_of(run_dir):
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
