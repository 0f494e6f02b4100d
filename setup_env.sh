#!/usr/bin/env bash
# Makes .venv and installs qerl with everything it needs on this machine, in the versions and with the hashes that stand in
# requirements/. You can run it again at any time: it does not touch an environment that is up to date. Two variables
# change what it does: PYTHON is the interpreter (default: the first that fits, else one that uv fetches), and
# QERL_DEVICE is cpu or gpu (default: gpu if nvidia-smi finds one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'setup_env.sh: %s\n' "$*" >&2; exit 1; }

# 1. An interpreter: the one that was asked for, the first that fits, that of an earlier .venv, or none (then see 4)
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }
version_of() { "$1" --version 2>/dev/null || echo "no Python"; }
python=${PYTHON:-}
if [ -n "$python" ]; then
    command -v "$python" >/dev/null || fail "$python was not found: install Python 3.11 to 3.13, or set PYTHON to one"
    fits "$python" || fail "$python is $(version_of "$python"): install Python 3.11 to 3.13, or set PYTHON to one"
else
    for each in python3 python3.12 python3.11 python3.13 python .venv/bin/python; do
        if fits "$each"; then python=$each && break; fi
    done
fi

# 2. Is there a GPU?
device=${QERL_DEVICE:-}
if [ -z "$device" ]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then device=gpu; else device=cpu; fi
fi
case $device in
    gpu) locked=(-r requirements/gpu.txt) size="10 GB" words="with a GPU" ;;
    cpu) locked=(-r requirements/torch-cpu.txt -r requirements/cpu.txt) size="2.4 GB" words="without a GPU" ;;
    *) fail "QERL_DEVICE is '$device': write cpu or gpu" ;;
esac

# 3. Is there anything to do?
stamp=.venv/.qerl-setup
inputs=$(cat pyproject.toml requirements/*.txt | cksum)
if [ -n "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$device $(version_of "$python") $inputs" ] &&
    .venv/bin/qerl recipes >/dev/null 2>&1; then
    say "the environment in .venv is up to date ($device)"
    exit 0
fi

# 4. The environment, with uv inside it, so that nothing outside of this folder changes. The version of uv is pinned as
# well: it decides which of the locked files are taken, and a newer one must not decide otherwise.
install_uv() { "$1" -m pip install --quiet --require-hashes -r requirements/uv.txt; }
fetch_python() { # into .venv, by the uv that is here or by one that any Python can install
    local scratch uv=uv
    scratch=$(mktemp -d)
    if ! command -v uv >/dev/null; then
        uv="$scratch/bin/python -m uv"
        { python3 -m venv "$scratch" && install_uv "$scratch/bin/python"; } >/dev/null 2>&1 || uv=false
    fi
    if $uv venv --quiet --seed --managed-python --python 3.12 .venv; then rm -rf "$scratch"; else
        rm -rf "$scratch"
        fail "no Python 3.11 to 3.13 is here (python3 is $(version_of python3)), and uv could not fetch one: install" \
            "python3.12, or set PYTHON to one"
    fi
}

if [ -z "$python" ]; then
    say "setting up .venv for a machine $words: python3 is $(version_of python3), so uv fetches Python 3.12"
    rm -rf .venv
    fetch_python
else
    say "setting up .venv for a machine $words ($(version_of "$python"))"
    if [ "$(version_of .venv/bin/python)" != "$(version_of "$python")" ]; then
        rm -rf .venv
        "$python" -m venv .venv ||
            fail "python's venv module does not work here: on Debian and Ubuntu, apt install python3-venv"
    fi
fi
pinned=$(sed -n 's/^uv==\([^ ]*\).*/uv \1/p' requirements/uv.txt)
case $(.venv/bin/python -m uv --version 2>/dev/null) in
    "$pinned" | "$pinned "*) ;;
    *) install_uv .venv/bin/python || fail "$pinned could not be installed: is the package index reachable?" ;;
esac
uv() { .venv/bin/python -m uv "$@"; }
# uv does not read pip's settings, so pass on a package mirror that is configured for pip.
[ -n "${PIP_INDEX_URL:-}" ] && export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
[ -n "${PIP_FIND_LINKS:-}" ] && export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}"

install() { uv pip install --python .venv/bin/python --no-deps "$@"; }
backend=
if [ "$device" = cpu ]; then # the configured sources may have the CPU build of torch; if not, PyTorch's own index has it
    install --quiet --dry-run --require-hashes -r requirements/torch-cpu.txt 2>/dev/null || backend=--torch-backend=cpu
fi
say "installing the packages of requirements/, which take about $size of disk"
install $backend --require-hashes "${locked[@]}" ||
    fail "the packages of requirements/ could not be installed: the lines above say which"
install --quiet --no-build-isolation --editable . || fail "qerl itself could not be installed: the lines above say why"
if [ "$device" = cpu ]; then
    .venv/bin/python -c 'import torch; raise SystemExit(torch.version.cuda is not None)' || fail "a CUDA build of torch came in"
fi

say "checking"
.venv/bin/qerl doctor || fail "qerl doctor found an error: see the table above"
echo "$device $(version_of .venv/bin/python) $inputs" >"$stamp"
say "ready: source .venv/bin/activate"
