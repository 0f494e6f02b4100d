#!/usr/bin/env bash
# Sets everything up and runs the tests; arguments go to pytest (scripts/test.sh -k noise). On a GPU: scripts/test.sh -m gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./setup_env.sh
exec .venv/bin/python -m pytest "$@"
