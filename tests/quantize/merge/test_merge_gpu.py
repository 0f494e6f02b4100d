"""Stock vLLM, without qerl's plugin, gives the greedy tokens of base + adapter from what `qerl merge` writes.

They last passed on an H200, vLLM 0.25.1: the printed lines on 2026-11-27, the others on 2026-11-22. A server takes a
minute to start, and lets nothing else take or release memory of the card meanwhile.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.run import quantize_checkpoint
from tests.helpers.greedy_tokens import NEW_TOKENS, arith_prompts, engine_tokens, same
from tests.helpers.roundings import rounding
from tests.helpers.stock_vllm import served_tokens, stock_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and importlib.util.find_spec("vllm")), reason="needs a CUDA device and vllm"
    ),
]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The trained run, prompts, and the greedy tokens of the transformers engine on the CPU with the run's adapter."""
    folder = tmp_path_factory.mktemp("work")
    base = folder / "checkpoints" / "tiny-NVFP4A16"
    quantize_checkpoint("tiny", base, rounding(device="cpu"))
    shutil.copytree(ROOT / "tests" / "data" / "tiny_run", folder / "runs" / "tiny_run")
    prompts = arith_prompts(base, 32)
    (folder / "prompts.json").write_text(json.dumps(prompts))
    (folder / "expected.json").write_text(json.dumps(engine_tokens(folder / "runs" / "tiny_run", prompts)))
    return folder


def vllm_tokens(work, model, adapter=""):
    return stock_tokens(model, json.loads((work / "prompts.json").read_text()), work, NEW_TOKENS, adapter)


def equal(work, tokens):
    return same(tokens, json.loads((work / "expected.json").read_text()))


def merged(work, to, name="merged"):
    run = work / "runs" / "tiny_run"
    return export(ExportOptions(str(run), to, work / f"{name}-{to}", prompt_count=0, device="cpu"))


def test_stock_vllm_loads_the_adapter_folder(work):
    report = merged(work, "adapter")
    base = report.commands["vllm"].split()[2]
    assert equal(work, vllm_tokens(work, base, report.out)) >= 30  # bfloat16 rounding may decide a near tie otherwise
    assert equal(work, vllm_tokens(work, base)) <= 16  # without the adapter it is another policy


@pytest.mark.parametrize(("to", "least"), [("bf16", 30), ("nvfp4", 26)])
def test_stock_vllm_loads_the_merged_model(work, to, least):
    assert equal(work, vllm_tokens(work, merged(work, to).out)) >= least


@pytest.mark.parametrize(("to", "least"), [("adapter", 30), ("bf16", 30), ("nvfp4", 26)])
def test_the_printed_line_serves_it(work, to, least):
    prompts = json.loads((work / "prompts.json").read_text())
    line = merged(work, to, "served").commands["vllm"]
    assert equal(work, served_tokens(line, prompts, work, NEW_TOKENS)) >= least


def test_the_effect_is_measured_on_the_vllm_engine(work):
    run = work / "runs" / "tiny_run"
    report = export(ExportOptions(str(run), "bf16", work / "measured", prompt_count=16, max_new_tokens=NEW_TOKENS))
    assert report.effect.kept > 0.95
    assert report.effect.prompts > 0
    assert report.effect.same_greedy > 0.8 * report.effect.prompts
