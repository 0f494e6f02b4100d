"""Training through the quantizer on a card: bytes, exports, and what others read of them.

Whole weights are trained, and an adapter.

Last run on an H100 on 2026-11-26: 17 of 18 passed in 276 s; the other is why whole weights have a higher rate since.
To run them on a CPU with the other engine, without what needs vLLM:

    QERL_TEST_ENGINE=transformers python -m pytest -n0 -m gpu tests/training/test_qat_gpu.py

The first run has the card to itself, so that kernels are compiled once. What follows runs side by side, each engine
within MEMORY_GIB.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from qerl.checkpoint.load import load_tokenizer
from qerl.data.examples import load_examples
from qerl.data.tasks import build_messages, get_task, render_prompt
from tests.helpers.cli_shell import ROOT, Shell
from tests.helpers.either_engine import ENGINE, ON_CARD, marks
from tests.helpers.stock_vllm import stock_tokens

pytestmark = marks(500)
MEMORY_GIB = 8
STEPS, QUESTIONS, TOKENS = 4, 64, 48
ADAPTER = ("qat.mode=adapter", "optim.learning_rate=2e-3")
WEIGHTS = ("optim.learning_rate=1e-3",)  # of which three steps change greedy tokens of eight prompts
# vLLM fuses q/k/v, whose rows here are no whole blocks of 128: attention stays in 16 bits.
FP8 = ("qat.quant_cfg=fp8_block", "qat.quant_cfg.ignore=['lm_head', 're:.*self_attn.*']")
GRADIENTS = ("train.fp8_recipe=tensorwise_gradients",)
RUNS = {  # by name: linears that are packed and trained, in four layers, and settings
    "nvfp4_w4a16": (28, [*WEIGHTS, "qat.quant_cfg=nvfp4_w4a16"]),
    "nvfp4_w4a16_ffn": (12, [*WEIGHTS, "qat.quant_cfg=nvfp4_w4a16_ffn"]),
    "adapter": (28, [*ADAPTER, "qat.start_in=card"]),
    "adapter_in_host": (28, [*ADAPTER, "qat.start_in=host"]),
    "fp8_block": (12, [*WEIGHTS, *FP8]),
    "fp8_blockwise": (12, [*WEIGHTS, *FP8, "train.fp8_recipe=blockwise"]),
    "fp8_gradients": (28, [*WEIGHTS, "qat.quant_cfg=nvfp4_w4a16", *GRADIENTS]),
}
EVALUATION = ["--limit", QUESTIONS, "--max-new-tokens", TOKENS, "--engine", ENGINE]
EVALUATION += ["--memory", MEMORY_GIB, "--deterministic"] if ON_CARD else []


def check(shell, name):
    """The report of scripts/checks/check_qat.py on one of RUNS in the shell's folder."""
    out = shell.folder / f"{name}.json"
    settings = [*RUNS[name][1], *([f"rollout.memory={MEMORY_GIB}"] if ON_CARD else [])]
    given = ["--run", shell.folder / name, "--steps", STEPS, "--engine", ENGINE, "--out", out]
    command = [
        sys.executable,
        ROOT / "scripts/checks/check_qat.py",
        *given,
        *(x for s in settings for x in ("--set", s)),
    ]
    done = subprocess.run(
        [*map(str, command)], cwd=shell.folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return SimpleNamespace(**json.loads(out.read_text()))


def evaluate(shell, out, model):
    shell.run(out, "eval", "arith", *EVALUATION, "--out", out, "--model", model)
    rows = [json.loads(line) for line in (shell.folder / out / "completions.jsonl").open()]
    return [(row["row"], row["completion"], row["correct"]) for row in rows]


def asked_prompts(model):
    """The prompts of the first test problems, as token ids."""
    tokenizer, task = load_tokenizer(model), get_task("arith")
    examples, _ = load_examples("arith", split="test", limit=QUESTIONS)
    return [render_prompt(tokenizer, build_messages(task, example.question)) for example in examples]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What was seen of all runs, and what commands and stock vLLM then made of the first, and of the adapter's."""
    shell = Shell(tmp_path_factory.mktemp("qat"))
    seen = {"nvfp4_w4a16": check(shell, "nvfp4_w4a16")}
    run, exported = shell.folder / "nvfp4_w4a16", shell.folder / "exported"
    shell.run("export", "export", "--run", run, "--out", exported)
    prompts = asked_prompts(exported)
    with ThreadPoolExecutor(4) as pool:
        others = {
            "stock": pool.submit(stock_tokens, exported, prompts, shell.folder, TOKENS) if ON_CARD else None,
            "of_run": pool.submit(evaluate, shell, "eval-run", run),
            "of_export": pool.submit(evaluate, shell, "eval-exported", exported),
        }
        checks = {name: pool.submit(check, shell, name) for name in RUNS if name not in seen}
    done = {name: future and future.result() for name, future in others.items()}
    seen |= {name: future.result() for name, future in checks.items()}
    merged, adapter = shell.folder / "merged", shell.folder / "adapter"
    shell.run("merge", "merge", "--adapter", adapter, "--to", "nvfp4", "--device", "cpu", "--out", merged)
    pair = (merged, adapter / "model")
    return SimpleNamespace(exported=exported, prompts=prompts, seen=seen, merged=pair, **done)


@pytest.fixture(scope="module")
def reference(ran):
    """The export in transformers, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ran.exported, device_map="cpu").eval()
    with torch.no_grad():
        model(input_ids=torch.tensor([[1]]))  # the first forward pass unpacks the weights, to bfloat16
    return torch.nn.Module.float(model)  # transformers' own refuses a model that was quantized


def gaps(model, prompt, tokens):
    """How far each token's logit is below the largest one, given the tokens before it."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("name", RUNS)
def test_the_engine_holds_the_reference_s_bytes_of_all_that_is_trained_at_the_same_addresses(ran, name):
    """Of an adapter they are those of its sum with the 16-bit weights, computed on the CPU."""
    seen = ran.seen[name]
    assert len(seen.sync["s"]) == STEPS
    assert seen.sync["linears"] == seen.sync["packed"] == RUNS[name][0]
    assert seen.sync["different"] == seen.sync["moved"] == []
    if ON_CARD:
        assert seen.graphs not in ("", "NONE")


@pytest.mark.parametrize("name", RUNS)
def test_captured_graphs_sample_from_the_new_weights(ran, name, record_property):
    first, last = ran.seen[name].greedy
    assert first != last
    record_property("mismatch_kl", ran.seen[name].mismatch_kl)
    assert max(ran.seen[name].mismatch_kl) < (3e-3 if ON_CARD else 5e-4)


def test_a_merge_on_the_cpu_has_the_bytes_of_the_model_that_the_card_packed(ran):
    merged, model = (load_file(folder / "model.safetensors") for folder in ran.merged)
    assert merged.keys() == model.keys()
    assert all(torch.equal(merged[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in model.items())


def greedy_of(model, prompt):
    out = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
    return out[0, len(prompt) :].tolist()


def same_as_evaluated(ran, written):
    """How many rows of token ids are what the evaluation of the run wrote."""
    tokenizer = load_tokenizer(ran.exported)
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written]
    return sum(text == completion for text, (_, completion, _) in zip(texts, sorted(ran.of_run), strict=True))


def test_transformers_writes_what_the_evaluation_of_the_run_wrote(ran, reference, record_property):
    """On a card the engine computes in bfloat16, which may decide a near-tie."""
    same = same_as_evaluated(ran, [greedy_of(reference, prompt) for prompt in ran.prompts])
    record_property("same", same)
    assert same >= (QUESTIONS * 3 // 4 if ON_CARD else QUESTIONS)


@pytest.mark.skipif(not ON_CARD, reason="needs vllm")
def test_stock_vllm_writes_the_greedy_tokens_of_transformers_and_of_our_engine(ran, reference, record_property):
    """Where they differ, bfloat16 has decided a near-tie: logits are up to about 20 here, where its steps are 1/8."""
    found = torch.cat([gaps(reference, *pair) for pair in zip(ran.prompts, ran.stock, strict=True)])
    same = same_as_evaluated(ran, ran.stock)
    record_property("stock", {"same": same, "largest_gap": float(found.max()), "differing": int((found > 0).sum())})
    assert float((found == 0).float().mean()) > 0.98
    assert float(found.max()) < 0.25
    assert same >= QUESTIONS * 3 // 4


def test_an_evaluation_of_the_export_is_that_of_the_run(ran):
    assert len(ran.of_run) == QUESTIONS
    assert sorted(ran.of_export) == sorted(ran.of_run)
    assert 0 < sum(correct for *_, correct in ran.of_run) < QUESTIONS
