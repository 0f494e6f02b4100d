#!/usr/bin/env bash
# Sets everything up and runs the tests, one process a core; arguments go to pytest (scripts/test.sh -k noise).
# The tests that need a GPU: .venv/bin/python -m pytest -m gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./setup_env.sh
export OMP_NUM_THREADS=1 # the models are tiny: more threads than processes only get in one another's way
exec .venv/bin/python -m pytest -n auto --dist loadfile "$@"
