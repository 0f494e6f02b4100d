"""A run in a process that dies at a chosen file operation."""

import os
import sys

OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def run_and_die(recipe, run_dir, at, listed=None):
    """Train, and die before file operation number `at` in `run_dir`; a list of all is written to `listed`."""
    import torch

    torch.set_num_threads(1)
    from qerl.config.recipe import load_config
    from training.run import start

    config, seen, run_dir = load_config(recipe), [], os.fspath(run_dir)

    def operation(kind, path):
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(run_dir):
            return
        seen.append(f"{kind} {os.path.relpath(path, run_dir)}")
        if len(seen) == at:
            os._exit(137)

    def audited(event, arguments):
        reads = event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if event in OPERATIONS and not reads:
            operation(event, arguments[0])

    fsync = os.fsync

    def watched_fsync(descriptor):
        operation("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = watched_fsync
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.addaudithook(audited)
    start(config, "tiny")
    with open(listed or os.devnull, "w") as file:
        file.write("\n".join(seen))
