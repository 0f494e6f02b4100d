#!/usr/bin/env bash
# Sets everything up and runs the tests with one process per core. One more, for when tests wait, costs more than it
# gains: on two cores 96 s of processor time, for what it imports and makes again.
# Arguments go to pytest (scripts/test.sh -k noise).
# Run the tests that need a GPU with `.venv/bin/python -m pytest -m gpu`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./setup_env.sh
unset PYTHONDONTWRITEBYTECODE # each process that a test starts would compile our modules again
export OMP_NUM_THREADS=1 # the models are tiny, so more threads than processes would only slow each other down
# The cores that this process may use: a container may have few of its machine's. macOS does not tell.
processes=$(.venv/bin/python -c 'import os; print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))')
exec .venv/bin/python -m pytest -n "$processes" --dist loadfile --no-loadscope-reorder "$@"
