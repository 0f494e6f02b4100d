#!/usr/bin/env bash
# What has to run on a card before a release, in batches of under ten minutes each on one H200; the seconds are estimates.
#
#     scripts/on_card.sh OUT BATCH...
#
#     engine   510 s  the vllm engine on small models, by each kernel: every check of check_engine; other attention
#     kernels  180 s  kernels, packing with shared prompts, layers, sampling, quantization, doctor
#     cache    250 s  fp8 KV cache, a KV cache that overflows, too small a cap, memory while weights load
#     closing  180 s  an engine closed, asleep too, and opened again; measures the card: nothing else may run on it
#     merge    180 s  merged folders in stock vLLM
#     cli      240 s  commands on the embedded model: a killed run, dynamic sampling, eval, memory, report, merge
#     step     330 s  workload A: as it is, without shared prompts, under 24 GiB; on a fresh machine the logs of the first two
#                     hold a first and a second start
#     startup  220 s  a first and a second start at 7B, with caches of their own
#     linear    95 s  the linears of a 7B layer: each way against its limit and against BF16, without and with LoRA; its
#                     attention in decode steps against FlashAttention; the small kernels of training against their limits
#     decode   260 s  decode speed at 7B without and with measured kernel choice
#     lora_cost 230 s decode speed at 7B with an adapter and without, in turns
#     decode32 540 s  decode speed at 32B: with an adapter, without, and stock vLLM with one, in BF16 and by Marlin
#     mixed    320 s  geometric lengths of 1 to 1024 tokens, ours and TRL's
#     shapes   320 s  3B, 8B and 14B: one step each under a cap
#     peaks    280 s  memory while training, resuming and evaluating under 24 GiB
#
# Logs and JSON go to OUT, one line a command to OUT/summary.txt; a failure does not stop the rest. CHECKPOINTS holds the
# random checkpoints (default: checkpoints/). QERL_COMMIT: the code's commit, for a copy without history (default: git's).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
checkpoints=${CHECKPOINTS:-checkpoints}
python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD OMP_NUM_THREADS=8

run() { # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 started=$SECONDS code=0
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
    echo "$name: exit $code, $((SECONDS - started)) s; $(tail -n 1 "$out/$name.log" | cut -c -160)" | tee -a "$out/summary.txt"
}

tests() { # NAME LIMIT_S PYTEST_ARGUMENTS...
    run "$1" "$2" "$python" -m pytest -n0 -q -m gpu -rf "${@:3}"
}

checkpoint() { # SHAPE NAME ARGUMENTS...
    [ -e "$checkpoints/$2/config.json" ] ||
        run "make-$2" 120 "$python" scripts/make_random_checkpoint.py --shape "$1" --out "$checkpoints/$2" "${@:3}"
}

step() { # NAME MODEL ARGUMENTS...
    run "$1" 280 "$python" scripts/bench_step.py --model "$checkpoints/$2" --out "$out/$1.json" "${@:3}"
}

decode() { # NAME MODEL ARGUMENTS...
    run "$1" 240 "$python" scripts/bench_rollout.py --model "$checkpoints/$2" --out "$out/$1.json" "${@:3}"
}

batch_engine() { tests engine 580 tests/test_qerl_engine_vllm.py -k "TestOnGPU or our_kernel_does_not_take"; }

batch_kernels() {
    tests packing 120 tests/test_training_packing.py tests/test_training_token_logprobs.py \
        tests/test_training_logprob_kernels.py tests/test_training_copies.py
    tests kernels 200 tests/test_qerl_nvfp4_gemm.py tests/test_qerl_layers_gpu.py \
        tests/test_qerl_layers_decode_attention.py tests/test_qerl_vllm_plugin_draw.py tests/test_scripts_bench_linear.py
    tests others 150 tests/test_quantize_gpu.py tests/test_qerl_doctor_kernels.py tests/test_qerl_own_memory.py
}

batch_cache() {
    tests fp8 280 tests/test_qerl_engine_vllm.py -k fp8
    tests overflow 200 tests/test_qerl_engine_vllm.py -k "larger_than or cannot_hold"
    tests loading 150 tests/test_qerl_engine_vllm.py -k packing_takes
}

batch_closing() { tests closing 400 tests/test_qerl_engine_vllm.py -k closed_engine; }

batch_merge() { tests merge 300 tests/test_quantize_merge_gpu.py; }

batch_cli() { tests cli 290 tests/test_cli_gpu.py --junitxml="$out/cli.xml" -o junit_family=xunit1; }

batch_step() {
    checkpoint qwen2.5-7b 7b
    step step-7b 7b --steps 3
    step step-7b-apart 7b --steps 3 --no-shared-prompts
    step step-7b-cap24 7b --steps 2 --cap-gib 24
}

batch_startup() {
    checkpoint qwen2.5-7b 7b
    run startup 400 "$python" scripts/bench_startup.py --model "$checkpoints/7b" --out "$out/startup-7b.json"
}

batch_decode() {
    checkpoint qwen2.5-7b 7b
    decode rollout-7b 7b
    decode rollout-7b-tuned 7b --tune
}

batch_linear() {
    run linear-7b-rank32 240 "$python" scripts/bench_linear.py --rank 32 --out "$out/linear-7b-rank32.json"
    run attention-7b 60 "$python" scripts/bench_attention.py --out "$out/attention-7b.json"
    run elementwise-7b 60 "$python" scripts/bench_elementwise.py --out "$out/elementwise-7b.json"
}

batch_lora_cost() {
    checkpoint qwen2.5-7b 7b
    local turns
    turns=$(mktemp -d)
    decode rollout-7b-qerl 7b --memory-share 0.28 --turns "$turns" --of 2 &
    decode rollout-7b-qerl-base 7b --rank 0 --memory-share 0.28 --turns "$turns" --of 2 &
    wait
}

batch_decode32() {
    checkpoint qwen2.5-32b 32b
    decode rollout-32b-qerl 32b --rank 16 --sequences 1 8 64 128
    decode rollout-32b-qerl-base 32b --rank 0 --sequences 1 8 64 128
    decode rollout-32b-marlin 32b --engine stock --kernel marlin --rank 16 --sequences 1 8 64 128
    checkpoint qwen2.5-32b 32b-16 --format bf16
    decode rollout-32b-bf16 32b-16 --engine stock --rank 16 --sequences 1 8 64 128
}

batch_mixed() {
    checkpoint qwen2.5-7b 7b-mixed --mean-tokens 300
    checkpoint qwen2.5-7b 7b-mixed-16 --mean-tokens 300 --format bf16
    step step-7b-mixed 7b-mixed --steps 3 --new-tokens 1024
    run step-7b-mixed-trl 280 "$python" scripts/bench_trl.py --model "$checkpoints/7b-mixed-16" --new-tokens 1024 \
        --steps 3 --out "$out/step-7b-mixed-trl.json"
}

batch_shapes() {
    checkpoint qwen2.5-3b 3b
    checkpoint llama3-8b 8b
    checkpoint qwen2.5-14b 14b
    step step-3b 3b --steps 1 --cap-gib 16
    step step-8b 8b --steps 1 --cap-gib 24
    step step-14b 14b --steps 1 --cap-gib 32
}

batch_peaks() {
    checkpoint qwen2.5-7b 7b
    run peaks 420 "$python" scripts/bench_peaks.py --model "$checkpoints/7b" --cap-gib 24 --out "$out/peaks-7b.json"
}

for batch in "$@"; do
    started=$SECONDS
    "batch_$batch"
    echo "== $batch: $((SECONDS - started)) s" | tee -a "$out/summary.txt"
done
