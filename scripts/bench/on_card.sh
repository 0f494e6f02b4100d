#!/usr/bin/env bash
# Everything that has to run on a card before a release, in batches of under ten minutes each on one H200, unless the
# description says how many cards. The seconds are estimates.
#
#     scripts/bench/on_card.sh OUT BATCH... [-- BATCH...]...
#
# The batches after a -- run on the next card of the machine at the same time. Each card then has a folder in OUT, named
# by its number.
#
#     engine   510 s  every check of check_engine on small models, with each kernel
#     told     130 s  completions reported as they end; an engine after an interrupted call
#     kernels  100 s  tests of kernels, packing, layers, sampling, quantization
#     pack     100 s  tests of packing weights
#     qatsmall 460 s  training through the quantizer and distillation on the embedded model
#     start    560 s  a frozen start of rank 32 at 7B: decode speed, a step, agreement
#     quantize 400 s  `qerl quantize` of a 7B
#     qat      480 s  7B: steps of full-weight training through the quantizer
#     qatfp8   360 s  the same with gradients in FP8, in BF16, and TRL's; 120 GiB of memory
#     qat80    540 s  full weights under 80 GiB: ours, and TRL's with micro-batches of 4, 16 and 32
#     qat80fp8 240 s  such steps with gradients in FP8; tests of the kernels that round for them
#     w4a4     480 s  4-bit activations: tests, and our engine beside the trainer and vLLM's emulation
#     cache    350 s  fp8 KV cache, one that overflows, memory while weights load, one copy of the base
#     closing  110 s  an engine closed and opened again; nothing else may run on the card
#     merge    340 s  merged folders in stock vLLM
#     python   180 s  runs after one another in one Python process
#     cli      260 s  commands on the embedded model
#     step     250 s  workload A: our step, TRL's step
#     micro    250 s  workload A by tokens per micro-batch: the source of OVERHEAD_TOKENS in qerl/plan
#     cap24     80 s  workload A under 24 GiB; nothing else should run
#     agree    110 s  engine and trainer at 7B: every check of check_engine
#     startup  220 s  a first and a second start at 7B, with caches of their own
#     episodes  60 s  tests of episodes
#     linear   100 s  linears and attention of a 7B layer against their limits
#     decode   450 s  decode speed at 7B in turns: ours with and without an adapter, vLLM's BF16 (merged, and with
#                     LoRA) and Marlin; with one card 800 s
#     prompts  300 s  the same after prompts of 1024 and 4096 tokens, and at 1.5B: ours, and vLLM's BF16 merged
#     fp8      470 s  FP8: tests, the engine on small models, agreement at 7B beside 16 bits
#     fp8decode 480 s decode speed at 7B in turns: FP8 ours and stock vLLM's, and our NVFP4
#     fp8step  520 s  workload A over FP8, 16 bits and NVFP4
#     fp8train 420 s  FP8 that trains: whole weights, and workload A with an adapter's gradients in FP8 and in BF16
#     attention 70 s  attention of decode steps with keys and values in 8 and in 16 bits
#     others   500 s  a Hopper as other cards: attention's tests and times, and engines as on 8.0 and 8.9
#     fp8kv    240 s  FP8 keys and values, calibrated: agreement, and decode speed beside 16 bits in turns
#     decode32 480 s  decode speed at 32B in turns: ours, and vLLM's BF16 merged
#     marlin32 560 s  the same with ours, with and without an adapter, and vLLM's Marlin
#     moe      380 s  a mixture of experts: kernels, and the engine on small models
#     hybrid   500 s  linear attention: fla-core's gradients, and the engine on a small Qwen3.5
#     gemma    400 s  the engine on a small Gemma 4
#     hybrid9  500 s  Qwen3.5-9B, its MLP in NVFP4: agreement, and decode speed beside vLLM's BF16 in turns; 30 GB of disk
#     hybridstep 590 s  workload A of Qwen3.5-9B: ours, and TRL's with TileLang; 30 GB of disk
#     hybrid27 590 s  Qwen3.5-27B: workload A under 80 GiB, and decode speed in turns; 70 GB of disk
#     moedecode 260 s decode speed of 16 layers of Qwen3-30B-A3B in turns; 25 GB of disk
#     moestep  430 s  Qwen3-30B-A3B at full depth: decode speed, and workload A under 80 GiB; 17 GB of disk
#     moepeer  400 s  workload A on those 16 layers: ours, and TRL's over BF16
#     mixed    590 s  geometric lengths up to 1024 tokens, and lengths as on GSM8K: ours and TRL's
#     ranks    560 s  two cards: workload A and geometric lengths on one card and on two; TRL's step on two
#     carried   90 s  a completion that goes on in the next step, on a small model
#     ranksqat 220 s  two cards: whole weights of a 7B
#     faults   650 s  two cards: a rank killed eight times (KILLS=3: 390 s), and whole weights twice
#     ranks4   560 s  four cards: as ranks, on one card, two and four
#     hosts4   220 s  four cards: workload A by two launchers with two cards each; a step of a 32B
#     killed4  300 s  four cards: one of two such launchers killed KILLS times (default 3)
#     qat4     120 s  four cards: whole weights of a 7B
#     ranks8   500 s  eight cards: as ranks, without TRL
#     shapes   320 s  3B, 8B and 14B: one step each under a cap
#     large    480 s  workloads B and C: a step of 32B, and one of 70B, under 80 GiB
#     peaks    200 s  memory while training, resuming and evaluating under 24 GiB
#     older    220 s  workload A by this tree and by an older one, of which there is a copy in the folder OLDER
#     faster   380 s  decode speed at 7B of both, in turns
#
# Which of them have not run yet: scripts/bench/README.md.
#
# Logs and JSON go to OUT, and one line per command to OUT/summary.txt; a failure does not stop the rest. Environment
# variables: CHECKPOINTS is the folder of random checkpoints (default: checkpoints/), which calls at the same time may
# share. QERL_COMMIT is the commit of the code, for a copy without history (default: as git says). SECONDS_LEFT is the
# number of seconds from now after which no command may still run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ " $* " == *" -- "* ]]; then
    out=$1 card=0 batches=()
    for word in "${@:2}" --; do
        if [ "$word" != -- ]; then
            batches+=("$word")
            continue
        fi
        CUDA_VISIBLE_DEVICES=$card bash scripts/bench/on_card.sh "$out/$card" "${batches[@]}" | sed -u "s/^/card $card: /" &
        card=$((card + 1)) batches=()
    done
    wait
    exit
fi

mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
checkpoints=${CHECKPOINTS:-checkpoints}
python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD OMP_NUM_THREADS=8
mkdir -p "$checkpoints"

run() { # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 started=$SECONDS code=0 left=$((${SECONDS_LEFT:-99999} - SECONDS))
    shift 2
    if [ "$left" -lt 5 ]; then
        code="none, no time was left"
    else
        timeout -k 5 $((left < limit ? left : limit)) "$@" >"$out/$name.log" 2>&1 || code=$?
    fi
    echo "$name: exit $code, $((SECONDS - started)) s; $(tail -n 1 "$out/$name.log" 2>/dev/null | cut -c -160)" | tee -a "$out/summary.txt"
    [ "$code" = 0 ]
}

tests() { # NAME LIMIT_S PYTEST_ARGUMENTS...
    run "$1" "$2" "$python" -m pytest -n0 -q -m gpu -rf "${@:3}"
}

checkpoint() { # SHAPE NAME ARGUMENTS...
    (
        flock 9
        [ -e "$checkpoints/$2.made" ] && exit
        run "make-$2" "${MAKE_S:-120}" "$python" scripts/models/make_random_checkpoint.py --shape "$1" --out "$checkpoints/$2" "${@:3}" &&
            touch "$checkpoints/$2.made"
    ) 9>"$checkpoints/$2.lock"
}

script() { # NAME LIMIT_S SCRIPT MODEL ARGUMENTS...
    run "$1" "$2" "$python" scripts/*/"$3.py" --model "$checkpoints/$4" --out "$out/$1.json" "${@:5}"
}

turns() { # PARTIES ARGUMENTS...: prepare for engines that measure decode speed in turns, by `turn`, on the first card
    folder=$(mktemp -d) opened=0
    local seen=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}
    IFS=, read -ra cards <<<"${seen:-0}"
    each=(--turns "$folder" --of "$1" "${@:2}")
}

turn() { # NAME MODEL SHARE ARGUMENTS...
    CUDA_VISIBLE_DEVICES=${cards[0]} script "rollout-$1" 560 bench_rollout "$2" --memory-share "$3" "${each[@]}" "${@:4}" &
}

alone() { # NAME MODEL SHARE ARGUMENTS...: let the same engine compile alone first, on a card without another engine
    local card=${cards[$((opened % ${#cards[@]}))]}
    CUDA_VISIBLE_DEVICES=$card script "open-$1" 200 bench_rollout "$2" --memory-share "$3" "${each[@]}" "${@:4}" --open-only &
    opened=$((opened + 1))
    [ $((opened % ${#cards[@]})) -ne 0 ] || wait
}

batch_engine() { tests engine 580 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k "TestOnGPU or our_kernel_does_not_support"; }

batch_told() { tests told 200 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k told_of_while; }

batch_kernels() {
    tests kernels 200 -n 6 tests/qerl/formats/nvfp4/test_gemm_gpu.py tests/qerl/model/test_layers_gpu.py \
        tests/qerl/model/test_decode_attention.py tests/qerl/engine/vllm/test_kernels.py tests/scripts/test_bench_linear.py \
        tests/qerl/model/test_packing.py tests/qerl/model/test_packed_attention_gpu.py \
        tests/qerl/model/test_logprobs.py tests/qerl/model/test_logprob_kernels.py tests/qerl/model/test_delta_*.py \
        tests/training/preflight/test_checks.py tests/training/run_dir/test_phase_times.py \
        tests/qerl/cli/test_kernels.py tests/qerl/formats/cuda/test_ahead.py
    tests others 150 tests/quantize/test_gpu.py tests/qerl/engine/test_memory.py tests/qerl/engine/test_loaded_base.py
}

batch_pack() {
    tests pack 150 tests/qerl/formats/nvfp4/test_pack_gpu.py tests/qerl/model/test_masters.py tests/training/policy/test_rounding.py
}

batch_qatsmall() {
    tests qatsmall 520 tests/training/test_qat_gpu.py --junitxml="$out/qatsmall.xml" -o junit_family=xunit1
    tests distillsmall 200 tests/training/test_distillation_gpu.py
}

batch_start() { # a frozen start beside the base: decode speed, a step, and agreement of engine and trainer
    local way
    checkpoint qwen2.5-7b 7b-start --start-rank 32
    turns 2 --sequences 1 8 32 128 256
    for way in alone turn; do
        $way 7b-zero 7b-start 0.4 --rank 32
        $way 7b-frozen 7b-start 0.4 --rank 64 # as many columns as a start and an adapter of 32 each
        wait
    done
    script step-7b-zero 200 bench_step 7b-start --steps 3 --set adapter.start=none
    script step-7b-frozen 200 bench_step 7b-start --steps 3 --set adapter.start=frozen
    tests start 200 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k "start"
}

batch_quantize() { # the default at 7B; seconds and what was chosen are in quantize_report.json
    tests quantize 90 tests/quantize/test_gptq_kernel.py tests/quantize/test_gpu.py
    checkpoint qwen2.5-7b 7b-16 --format bf16
    run quantize-7b 240 "$python" -m qerl.cli.main quantize --model "$checkpoints/7b-16" --overwrite --out "$checkpoints/7b-quantized"
    cp "$checkpoints/7b-quantized/quantize_report.json" "$out/quantize-7b.json"
}

batch_qat() {
    checkpoint qwen2.5-7b 7b
    checkpoint qwen2.5-7b 7b-16 --format bf16
    script qat-7b 460 bench_qat 7b-16 --steps 20
    script qat-7b-adapter 200 bench_step 7b --steps 3 --set noise.enabled=false
}

batch_qatfp8() {
    checkpoint qwen2.5-7b 7b-16 --format bf16
    script qat-7b-gradients-fp8 200 bench_qat 7b-16 --steps 3 --set train.fp8_recipe=tensorwise_gradients
    script qat-7b-gradients-bf16 180 bench_qat 7b-16 --steps 3
    script step-7b-trl-full 200 bench_trl 7b-16 --full --tuned --steps 3
}

batch_qat80() { # a card of 80 GiB, where TRL has to recompute its activations or take small micro-batches
    checkpoint qwen2.5-7b 7b-16 --format bf16
    script qat-7b-80 240 bench_qat 7b-16 --steps 3 --masters auto
    script step-7b-trl-full-80-4 240 bench_trl 7b-16 --full --tuned --micro-batch 4 --cap-gib 80 --steps 3
    local rows
    for rows in 16 32; do
        script step-7b-trl-full-80-$rows 240 bench_trl 7b-16 --full --tuned --checkpointing --micro-batch $rows --cap-gib 80 --steps 3
    done
}

batch_qat80fp8() {
    tests to-fp8 60 tests/qerl/formats/nvfp4/test_to_fp8.py tests/qerl/formats/fp8/test_kernels.py
    checkpoint qwen2.5-7b 7b-16 --format bf16
    script qat-7b-80-gradients-fp8 240 bench_qat 7b-16 --steps 3 --masters auto --set train.fp8_recipe=tensorwise_gradients
}

batch_w4a4() {
    tests w4a4-tests 300 tests/qerl/formats/nvfp4/test_activations_gpu.py tests/qerl/engine/test_activations_gpu.py
    checkpoint qwen2.5-7b 7b-w4a4 --activations static
    script w4a4-7b 280 check_w4a4 7b-w4a4
}

batch_cache() {
    tests fp8 280 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k fp8
    tests overflow 200 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k "larger_than or cannot_hold"
    tests loading 150 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k "packing_needs or base_once"
}

batch_closing() { tests closing 400 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k closed_engine; }

batch_merge() {
    tests merge-experts 150 tests/quantize/merge/test_merge_experts_gpu.py
    tests merge 300 tests/quantize/merge/test_merge_gpu.py
}

batch_python() { tests python 300 tests/qerl/api/test_training_gpu.py; }
batch_cli() { tests cli 400 tests/qerl/cli/test_cli_gpu.py --junitxml="$out/cli.xml" -o junit_family=xunit1; }

batch_step() {
    checkpoint qwen2.5-7b 7b
    checkpoint qwen2.5-7b 7b-16 --format bf16
    script step-7b-qerl 280 bench_step 7b --steps 3
    script step-7b-trl 280 bench_trl 7b-16 --steps 3
}

batch_micro() {
    local tokens
    checkpoint qwen2.5-7b 7b
    for tokens in 9216 18432 32768; do
        script "step-7b-qerl-tokens$tokens" 200 bench_step 7b --steps 3 --micro-batch-tokens "$tokens"
    done
}

batch_cap24() {
    checkpoint qwen2.5-7b 7b
    script step-7b-qerl-cap24 280 bench_step 7b --steps 2 --cap-gib 24
}

batch_agree() {
    checkpoint qwen2.5-7b 7b
    script agree-7b 400 check_engine 7b
}

batch_startup() {
    checkpoint qwen2.5-7b 7b
    script startup-7b 400 bench_startup 7b
}

batch_episodes() { tests episodes 120 tests/qerl/episodes; }

batch_linear() {
    run linear-7b-rank32 240 "$python" scripts/bench/bench_linear.py --rank 32 --out "$out/linear-7b-rank32.json"
    run attention-7b 60 "$python" scripts/bench/bench_attention.py --out "$out/attention-7b.json"
}

batch_decode() {
    local way
    checkpoint qwen2.5-7b 7b &
    checkpoint qwen2.5-7b 7b-16 --format bf16 &
    wait
    turns 5 --sequences 1 8 32 64 128 256
    for way in alone turn; do
        $way 7b-qerl 7b 0.18
        $way 7b-qerl-base 7b 0.18 --rank 0
        $way 7b-merged 7b-16 0.18 --engine stock --rank 0
        $way 7b-marlin 7b 0.18 --engine stock --kernel marlin
        $way 7b-bf16 7b-16 0.18 --engine stock
        wait
    done
}

batch_prompts() {
    local way length
    checkpoint qwen2.5-7b 7b &
    checkpoint qwen2.5-7b 7b-16 --format bf16 &
    checkpoint qwen2.5-1.5b 1.5b &
    checkpoint qwen2.5-1.5b 1.5b-16 --format bf16 &
    wait
    for length in 1024 4096; do
        turns 2 --sequences 16 48 --cached-prompts --prompt-tokens $length
        for way in alone turn; do
            $way "7b-qerl-$length" 7b 0.4
            $way "7b-merged-$length" 7b-16 0.4 --engine stock --rank 0
            wait
        done
    done
    turns 2 --sequences 1 8 32 64 128 256
    for way in alone turn; do
        $way 1.5b-qerl 1.5b 0.3
        $way 1.5b-merged 1.5b-16 0.3 --engine stock --rank 0
        wait
    done
}

small_fp8() { # SHAPE: every check on a small model in FP8
    checkpoint "$1" "$1-fp8" --format fp8_block
    script "engine-$1-fp8" 150 check_engine "$1-fp8" --format fp8_block
}

batch_fp8() {
    tests fp8 150 tests/qerl/formats/fp8
    small_fp8 small-qwen2
    checkpoint qwen2.5-7b 7b-fp8 --format fp8_block
    script agree-7b-fp8 200 check_engine 7b-fp8 --format fp8_block --only shared_memory product agreement adapter
    checkpoint qwen2.5-7b 7b-16 --format bf16
    script agree-7b-16 200 check_engine 7b-16 --format bf16 --only agreement adapter
    small_fp8 small-qwen3
    checkpoint small-qwen3 small-qwen3-16 --format bf16
    run quantize-fp8-16 60 "$python" -m qerl.cli.main quantize --model "$checkpoints/small-qwen3-16" --scheme fp8_block \
        --activations none --scales fp32 --overwrite --out "$checkpoints/small-qwen3-fp8-16"
    script engine-small-qwen3-fp8-16 150 check_engine small-qwen3-fp8-16 --format fp8_block
}

batch_fp8decode() { # all four open at once: one by one, and then again, does not fit ten minutes
    checkpoint qwen2.5-7b 7b &
    checkpoint qwen2.5-7b 7b-fp8 --format fp8_block &
    wait
    turns 4
    turn 7b-fp8-qerl 7b-fp8 0.2
    VLLM_USE_DEEP_GEMM=0 turn 7b-fp8-stock-cutlass 7b-fp8 0.25 --engine stock
    turn 7b-fp8-stock 7b-fp8 0.25 --engine stock
    turn 7b-qerl 7b 0.2
    wait
}

batch_fp8step() {
    checkpoint qwen2.5-7b 7b
    checkpoint qwen2.5-7b 7b-16 --format bf16
    checkpoint qwen2.5-7b 7b-fp8 --format fp8_block
    local work=(--steps 3 --set noise.enabled=false)
    script step-7b-bf16 160 bench_step 7b-16 "${work[@]}" --set model.format=bf16
    script step-7b-fp8-blockwise 260 bench_step 7b-fp8 "${work[@]}" --set model.format=fp8_block --set train.fp8_recipe=blockwise
    script step-7b-fp8 160 bench_step 7b-fp8 "${work[@]}" --set model.format=fp8_block
    script step-7b-nvfp4 160 bench_step 7b "${work[@]}"
}

batch_fp8train() {
    checkpoint qwen2.5-7b 7b-16 --format bf16
    script qat-7b-fp8 240 bench_qat 7b-16 --steps 4 --set model.format=fp8_block --set qat.quant_cfg=fp8_block \
        --set train.fp8_recipe=blockwise
    checkpoint qwen2.5-7b 7b
    script step-7b-gradients-bf16 160 bench_step 7b --steps 4
    script step-7b-gradients-fp8 160 bench_step 7b --steps 4 --set train.fp8_recipe=tensorwise_gradients
}

LONG=(--sequences 48 --prompt-tokens 4096 --new-tokens 257 --cached-prompts)

agree_of() { # NAME ARGUMENTS...: agreement of a 7B, of which several may run at once
    script "agree-7b-$1" 200 check_engine 7b --only agreement --memory 20 "${@:2}" &
}

batch_attention() {
    local bits
    for bits in 8 16; do
        run "attention-7b-$bits-bits" 90 "$python" scripts/bench/bench_attention.py --bits "$bits" --out "$out/attention-7b-$bits-bits.json"
    done
    tests attention 150 -n 6 tests/qerl/model/test_decode_attention.py
}

batch_others() {
    local engine=tests/qerl/engine/vllm/test_vllm_engine_gpu.py
    tests others 200 -n 6 tests/qerl/model/test_decode_attention.py
    run attention-7b-8.0 90 "$python" scripts/bench/bench_attention.py --architecture compute_80 --out "$out/attention-7b-8.0.json"
    run attention-7b-8.9 90 "$python" scripts/bench/bench_attention.py --bits 8 --architecture compute_89 \
        --out "$out/attention-7b-8.9.json"
    QERL_CAPABILITY=8.0 tests engine-8.0 400 $engine -k "tiny-qwen2 or our_kernel_does_not_support"
    QERL_CAPABILITY=8.9 tests engine-8.9 120 $engine -k an_fp8_cache_agrees
}

batch_fp8kv() {
    checkpoint qwen2.5-7b 7b
    turns 2 "${LONG[@]}" --rounds 4
    turn 7b-kv-fp8 7b 0.3 --kv-cache-dtype fp8
    turn 7b-kv-auto 7b 0.3
    wait
    agree_of kv-fp8 --kv-cache-dtype fp8 --calibrate-kv
    wait
}

batch_decode32() {
    local way
    checkpoint qwen2.5-32b 32b &
    checkpoint qwen2.5-32b 32b-16 --format bf16 &
    wait
    turns 2 --sequences 1 8 32 64 128
    for way in alone turn; do
        $way 32b-qerl 32b 0.3
        $way 32b-merged 32b-16 0.6 --engine stock --rank 0
        wait
    done
}

batch_marlin32() {
    local way
    checkpoint qwen2.5-32b 32b
    turns 3 --sequences 1 8 64 128
    for way in alone turn; do
        $way 32b-qerl-beside 32b 0.3 --rank 16
        $way 32b-qerl-base 32b 0.3 --rank 0
        $way 32b-marlin 32b 0.3 --rank 16 --engine stock --kernel marlin
        wait
    done
}

batch_moe() {
    tests moe-kernels 100 tests/qerl/formats/nvfp4/test_linear.py tests/qerl/engine/vllm/test_kernels.py \
        tests/qerl/model/test_experts_gpu.py tests/qerl/model/test_experts.py
    tests moe-engine 480 tests/qerl/engine/test_experts_gpu.py --junitxml="$out/moe.xml" -o junit_family=xunit1
}

batch_hybrid() {
    run gdn 300 "$python" scripts/bench/bench_gdn.py --out "$out/gdn.json"
    tests hybrid 400 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k "qwen3.5"
    run gdn-tilelang 150 "$python" scripts/bench/bench_gdn.py --tilelang --tokens 16384 --out "$out/gdn-tilelang.json"
}

batch_gemma() { tests gemma 400 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k "gemma4"; }

batch_hybrid9() {
    checkpoint qwen3.5-9b 9b --ignore 're:.*_attn.*'
    script agree-9b 250 check_engine 9b --only agreement adapter noise sleep_and_wake
    checkpoint qwen3.5-9b 9b-16 --format bf16
    turns 2 --sequences 1 8 32 128
    turn 9b-qerl 9b 0.4
    turn 9b-merged 9b-16 0.5 --engine stock --rank 0
    wait
}

batch_hybridstep() {
    checkpoint qwen3.5-9b 9b-nvfp4
    checkpoint qwen3.5-9b 9b-16 --format bf16
    script step-9b-qerl 330 bench_step 9b-nvfp4 --steps 4
    script step-9b-trl-tuned 330 bench_trl 9b-16 --tuned --steps 3
}

batch_hybrid27() { # the states of 128 sequences and their attention's blocks take 25 GiB of an engine
    checkpoint qwen3.5-27b 27b
    checkpoint qwen3.5-27b 27b-16 --format bf16
    script step-27b-qerl-cap80 330 bench_step 27b --steps 2 --cap-gib 80
    turns 2 --sequences 8 32 128
    turn 27b-qerl 27b 0.4
    turn 27b-merged 27b-16 0.55 --engine stock --rank 0
    wait
}

batch_moedecode() { # all three open at once
    checkpoint qwen3-30b-a3b a3b-16-layers --layers 16 &
    checkpoint qwen3-30b-a3b a3b-16-layers-16 --layers 16 --format bf16 &
    wait
    turns 3 --sequences 1 8 32 128 256 --rank 16
    turn a3b-16-layers-qerl a3b-16-layers 0.2
    turn a3b-16-layers-stock a3b-16-layers 0.25 --engine stock
    turn a3b-16-layers-bf16 a3b-16-layers-16 0.35 --engine stock
    wait
}

batch_moepeer() {
    checkpoint qwen3-30b-a3b a3b-16-layers --layers 16
    checkpoint qwen3-30b-a3b a3b-16-layers-16 --layers 16 --format bf16
    script step-a3b-16-layers-qerl 200 bench_step a3b-16-layers --steps 3 --rank 16
    script step-a3b-16-layers-trl 200 bench_trl a3b-16-layers-16 --steps 3 --rank 16
    script step-a3b-16-layers-trl-tuned 200 bench_trl a3b-16-layers-16 --steps 3 --rank 16 --tuned
}

batch_moestep() {
    MAKE_S=240 checkpoint qwen3-30b-a3b a3b
    script step-a3b-qerl-cap80 300 bench_step a3b --cap-gib 80 --steps 3 --rank 16 --set noise.enabled=false
    script rollout-a3b-qerl 200 bench_rollout a3b --rank 16 --sequences 1 8 32 128 256
    script rollout-a3b-qerl-no-replay 150 bench_rollout a3b --rank 16 --no-replay --sequences 1 128
}

batch_mixed() { # geometric lengths, and lengths as a small model's on GSM8K
    local lengths name mean most
    for lengths in "mixed 300 1024" "real 600 512"; do
        read -r name mean most <<<"$lengths"
        checkpoint qwen2.5-7b "7b-$name" --mean-tokens "$mean"
        checkpoint qwen2.5-7b "7b-$name-16" --mean-tokens "$mean" --format bf16
        script "step-7b-qerl-$name" 280 bench_step "7b-$name" --steps 4 --new-tokens "$most"
        script "step-7b-trl-tuned-$name" 280 bench_trl "7b-$name-16" --tuned --steps 4 --new-tokens "$most"
    done
}

ranks() { # NAME LIMIT_S CARDS SCRIPT MODEL ARGUMENTS...
    run "$1" "$2" "$python" -m torch.distributed.run --standalone --nproc-per-node "$3" scripts/*/"$4.py" \
        --model "$checkpoints/$5" --out "$out/$1.json" "${@:6}"
}

one_card() { # CARD BESIDE NAME LIMIT_S SCRIPT MODEL ARGUMENTS...: on one of several cards, while others work, too
    CUDA_VISIBLE_DEVICES=$1 QERL_BESIDE=$2 script "${@:3}" &
}

ranks_checkpoints() {
    checkpoint qwen2.5-7b 7b &
    checkpoint qwen2.5-7b 7b-mixed --mean-tokens 300 &
    checkpoint qwen2.5-7b 7b-16 --format bf16 &
    tests nccl 120 tests/qerl/base/test_parallel_gpu.py
    wait
}

on_cards() { # CARDS: workload A, geometric lengths and CARDS times the batch
    ranks "step-7b-cards$1" 200 "$1" bench_step 7b --steps 4
    ranks "step-7b-mixed-cards$1" 150 "$1" bench_step 7b-mixed --steps 4 --new-tokens 1024
    ranks "step-7b-cards$1-weak" 120 "$1" bench_step 7b --steps 4 --prompts $((16 * $1))
}

on_one() { # workload A and geometric lengths on one card each, at the same time
    one_card 0 "geometric lengths on card 1${1:+, $1}" step-7b-cards1 300 bench_step 7b --steps 4
    one_card 1 "workload A on card 0${1:+, $1}" step-7b-mixed-cards1 300 bench_step 7b-mixed --steps 4 --new-tokens 1024
}

batch_ranks() {
    ranks_checkpoints
    on_one
    wait
    on_cards 2
    ranks step-7b-trl-cards2 200 2 bench_trl 7b-16 --steps 3 --tuned
}

batch_ranks4() { # two cards on the other half of the host, while one card each works on the first
    MAKE_S=240 checkpoint qwen2.5-32b 32b & # for hosts4, which comes next: it takes 10 s more than the others
    ranks_checkpoints
    on_one "workload A on cards 2 and 3"
    CUDA_VISIBLE_DEVICES=2,3 QERL_BESIDE="workload A on card 0, geometric lengths on card 1" \
        ranks step-7b-cards2 300 2 bench_step 7b --steps 4 &
    wait
    on_cards 4
    ranks step-7b-trl-cards4 200 4 bench_trl 7b-16 --steps 3 --tuned
}

host_of() { # NUMBER NAME ARGUMENTS...: one of two hosts, which has two of the four cards
    CUDA_VISIBLE_DEVICES=$((2 * $1)),$((2 * $1 + 1)) run "$2-host$1" 200 "$python" -m torch.distributed.run --nnodes 2 \
        --node-rank "$1" --nproc-per-node 2 --rdzv-endpoint 127.0.0.1:29517 "${@:3}" --out "$out/$2.json"
}

batch_hosts4() { # two launchers with two cards each, as on two hosts; and 32B on four cards
    checkpoint qwen2.5-7b 7b
    local host
    for host in 0 1; do
        host_of "$host" step-7b-hosts2 scripts/bench/bench_step.py --model "$checkpoints/7b" --steps 4 &
    done
    wait
    MAKE_S=240 checkpoint qwen2.5-32b 32b
    ranks step-32b-cards4 300 4 bench_step 32b --steps 2 --rank 16 --group 8 --prompts 8 --prompt-tokens 256 \
        --new-tokens 2048 --set noise.enabled=false
}

batch_killed4() { # one of two hosts with two cards each is killed; at last the run goes on with two cards
    check_faults killed-hosts --hosts --ranks 4 --per-host 2 --kills "${KILLS:-3}" --left 1 --engine vllm --set rollout.memory=7
}

batch_qat4() {
    checkpoint qwen2.5-7b 7b-16 --format bf16
    ranks qat-7b-cards4 200 4 bench_qat 7b-16 --steps 3
}

batch_ranks8() {
    ranks_checkpoints
    on_one
    wait
    on_cards 8
}

batch_carried() { tests carried 250 tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k go_on_in_the_next; }

batch_ranksqat() {
    checkpoint qwen2.5-7b 7b-16 --format bf16
    ranks qat-7b-cards2 300 2 bench_qat 7b-16 --steps 4
}

batch_faults() {
    check_faults kills --kills "${KILLS:-8}" --engine vllm --set rollout.memory=7
    check_faults kills-weights --kills 2 --qat
}

check_faults() { # NAME ARGUMENTS...
    run "$1" 590 "$python" scripts/checks/check_faults.py --runs "$(mktemp -d)/runs" --out "$out/$1.json" "${@:2}"
}

batch_shapes() {
    checkpoint qwen2.5-3b 3b
    checkpoint llama3-8b 8b
    checkpoint qwen2.5-14b 14b
    script step-3b 280 bench_step 3b --steps 1 --cap-gib 16
    script step-8b 280 bench_step 8b --steps 1 --cap-gib 24
    script step-14b 280 bench_step 14b --steps 1 --cap-gib 32
}

batch_large() {
    local one=(--cap-gib 80 --steps 1 --rank 16 --group 8 --prompt-tokens 256 --set noise.enabled=false)
    checkpoint qwen2.5-32b 32b
    script step-32b-qerl-cap80 300 bench_step 32b "${one[@]}" --prompts 8 --new-tokens 2048
    checkpoint llama3-70b 70b
    script step-70b-qerl-cap80 300 bench_step 70b "${one[@]}" --prompts 4 --new-tokens 512
}

batch_peaks() {
    checkpoint qwen2.5-7b 7b
    script peaks-7b 420 bench_peaks 7b --cap-gib 24
}

older() { # NAME LIMIT_S SCRIPT MODEL ARGUMENTS...
    local file
    file=$(cd "$OLDER" && find scripts -name "$3.py")
    run "$1" "$2" env -C "$OLDER" QERL_COMMIT="${OLDER_COMMIT:-unknown}" "$python" "$file" --model "$(realpath "$checkpoints/$4")" --out "$out/$1.json" "${@:5}"
}

batch_older() {
    checkpoint qwen2.5-7b 7b
    older step-7b-older 280 bench_step 7b --steps 4
    script step-7b-now 280 bench_step 7b --steps 4
}

batch_faster() {
    checkpoint qwen2.5-7b 7b
    turns 2 --sequences 1 8 32 128 256 --memory-share 0.3
    older open-7b-older 200 bench_rollout 7b "${each[@]}" --open-only
    script open-7b-now 200 bench_rollout 7b "${each[@]}" --open-only
    older rollout-7b-older 500 bench_rollout 7b "${each[@]}" &
    script rollout-7b-now 500 bench_rollout 7b "${each[@]}" &
    wait
}

for batch in "$@"; do
    started=$SECONDS
    "batch_$batch"
    echo "== $batch: $((SECONDS - started)) s" | tee -a "$out/summary.txt"
done
