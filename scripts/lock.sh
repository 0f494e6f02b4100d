#!/usr/bin/env bash
# Resolves the packages that pyproject.toml asks for and writes them, with their hashes, to requirements/, from where
# setup_env.sh installs them. Versions that are there already stay as long as they fit; --upgrade takes the newest ones,
# --upgrade-package NAME one of them. Neither torch nor vLLM is installed for that. Run it after a change of
# dependencies; tests/scripts/test_lock.py finds out whether you should have.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${PIP_INDEX_URL:-}" ] && export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
[ -n "${PIP_FIND_LINKS:-}" ] && export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}"

resolve() { # FILE, REQUIREMENTS..., OPTIONS...
    local file=requirements/$1
    shift
    .venv/bin/python -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command scripts/lock.sh --output-file "$file" "$@" >/dev/null
    echo "$file: $(grep -c '^[a-z].*==' "$file") packages"
}

resolve cpu.txt pyproject.toml requirements/torch-cpu.txt --no-emit-package torch --extra quantize --extra dev "$@"
# The torch that vllm 0.25.1 was built for; PyPI's wheels are for CUDA 13.
echo 'torch==2.11.0' | resolve gpu.txt pyproject.toml - --extra gpu --extra quantize --extra dev "$@"
grep '^uv==' requirements/uv.txt | sed 's/ .*//' | resolve uv.txt - "$@"
