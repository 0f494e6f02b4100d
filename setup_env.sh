#!/usr/bin/env bash
# Makes .venv and installs qerl with everything it needs on this machine. You can run it again at any time: it does not
# touch an environment that is up to date. Two variables change what it does: PYTHON is the interpreter (default
# python3), and QERL_DEVICE is cpu or gpu (default: gpu if nvidia-smi finds one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'setup_env.sh: %s\n' "$*" >&2; exit 1; }

# 1. An interpreter
python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python was not found: install Python 3.11 to 3.13, or set PYTHON to one"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
    fail "$("$python" --version) is not supported: install Python 3.11 to 3.13, or set PYTHON to one"

# 2. Is there a GPU?
device=${QERL_DEVICE:-}
if [ -z "$device" ]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then device=gpu; else device=cpu; fi
fi
case $device in
    gpu) extras=gpu,quantize,dev torch=torch==2.11.0 backend=() ;; # the version that vllm 0.25.1 was built for
    cpu) extras=quantize,dev torch=torch==2.13.0+cpu backend=() ;;
    *) fail "QERL_DEVICE is '$device': write cpu or gpu" ;;
esac
[ "$device-$(uname -s)" = cpu-Darwin ] && torch=torch==2.13.0 # wheels for macOS have neither CUDA nor the suffix

# 3. Is there anything to do?
stamp=.venv/.qerl-setup
want="$device $("$python" --version) $(cksum <pyproject.toml)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && .venv/bin/qerl recipes >/dev/null 2>&1; then
    say "the environment in .venv is up to date ($device)"
    exit 0
fi

# 4. The environment, with uv inside it, so that nothing outside of this folder changes
say "setting up .venv for a machine $([ "$device" = gpu ] && echo "with a GPU" || echo "without a GPU") ($("$python" --version))"
if [ ! -x .venv/bin/python ] || [ "$(.venv/bin/python --version 2>&1)" != "$("$python" --version)" ]; then
    rm -rf .venv
    "$python" -m venv .venv || fail "python's venv module does not work here: on Debian and Ubuntu, apt install python3-venv"
fi
.venv/bin/python -m uv --version >/dev/null 2>&1 || .venv/bin/python -m pip install --quiet uv ||
    fail "uv could not be installed: is the package index reachable?"
uv() { .venv/bin/python -m uv "$@"; }
export UV_COMPILE_BYTECODE=1 # once now instead of at every start: torch and transformers are large
# uv does not read pip's settings, so pass on a package mirror that is configured for pip.
[ -n "${PIP_INDEX_URL:-}" ] && export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
[ -n "${PIP_FIND_LINKS:-}" ] && export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS// /,}}"

say "installing $torch"
install_torch() { uv pip install --quiet --python .venv/bin/python "$@" "$torch"; }
if [ "$device" = cpu ]; then
    # Try the configured sources first, then PyTorch's own index of CPU builds. A plain "torch" would install CUDA.
    install_torch 2>/dev/null || install_torch --torch-backend=cpu ||
        fail "the CPU build of torch 2.13.0 was not found: neither in PIP_FIND_LINKS nor on PyTorch's index of CPU builds"
else
    install_torch || fail "torch 2.11.0 could not be installed"
fi

say "installing qerl[$extras]"
uv pip install --quiet --python .venv/bin/python "$torch" --editable ".[$extras]" ||
    fail "the packages could not be installed: the lines above say which"
if [ "$device" = cpu ]; then
    .venv/bin/python -c 'import torch; raise SystemExit(torch.version.cuda is not None)' || fail "a CUDA build of torch came in"
fi

say "checking"
.venv/bin/qerl doctor || fail "qerl doctor found an error: see the table above"
echo "$want" >"$stamp"
say "ready: source .venv/bin/activate"
