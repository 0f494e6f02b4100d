#!/usr/bin/env python3
"""Quantize models by every method and both kinds of global scale, and write what each does to outputs on held-out rows.

    python scripts/study/study_quantize.py --out benchmarks/quantization/tiny.json                # the embedded model
    python scripts/study/study_quantize.py --random --layers 12 --out benchmarks/quantization/random.json
    python scripts/study/study_quantize.py --model checkpoints/arith-21m --rows arith_chain --out ... --eval arith_chain
    python scripts/study/study_quantize.py --table benchmarks/quantization/*.json                # the page of tables

The numbers are those of `quantize_report.json`: logit error, KL and top token against the 16-bit model, the accuracy of
the next token, the mean output error of the linears, and the mean SQNR of the weights. All methods see the same
calibration rows and are measured on the same others. `--eval TASK` grades greedy answers by each model too.

A random model has weights like a new network's, norms with a few channels `--outlier` times the others, as trained
models have them, and random bytes as rows; it shows the methods on their own, not what a task needs.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

METHODS = ("rtn", "awq", "gptq")
SCALES = ("amax", "pow2")
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
OUTLIERS = (17, 90, 200)  # channels of a random model

Row = dict[str, Any]


def main() -> None:
    arguments = options()
    if arguments.table:
        print(page([json.loads(path.read_text(encoding="utf-8")) for path in arguments.table]), end="")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from scripts.bench.provenance import command, machine

    with tempfile.TemporaryDirectory() as work:
        model, rows = arguments.model, arguments.rows
        if arguments.random:
            model, rows = random_model(Path(work), arguments)
        results = list(measured(model, rows, arguments, Path(work)))
    name = f"random, {arguments.layers} layers, outliers x {arguments.outlier:g}" if arguments.random else model
    report = {"command": command(), **machine(), "model": name}
    report |= {"calibration": [arguments.size, arguments.length], "results": results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(page([report]), end="")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", default="arith", help="task, file or hub name, as for `qerl quantize --calibration`")
    parser.add_argument("--random", action="store_true", help="a random model and rows of random bytes instead")
    parser.add_argument("--layers", type=int, default=6, help="of the random model")
    parser.add_argument("--outlier", type=float, default=1.0, help="factor of the outlier channels of the random model")
    parser.add_argument("--size", type=int, default=256, help="calibration sequences")
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--eval", metavar="TASK", help="grade greedy answers to 300 questions as well")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="print a page from files that were written before")
    return parser.parse_args()


def measured(model: str, rows: str, arguments: argparse.Namespace, work: Path) -> Iterator[Row]:
    """One row per method and kind of scale; the first is the 16-bit model, if its answers are graded."""
    from quantize.options import QuantizeOptions
    from quantize.run import quantize_checkpoint

    if arguments.eval:
        yield {"method": "16-bit", "task_accuracy": graded(model, arguments.eval, work / "eval")}
    for method in arguments.methods:
        for scale in SCALES:
            out = work / f"{method}-{scale}"
            size = arguments.size
            data = {"calibration": rows, "calibration_size": size, "sequence_length": arguments.length}
            asked = QuantizeOptions(method, scale, **data, batch_size=min(8, size))
            report = quantize_checkpoint(model, out, asked)
            found, linears = report.outputs, report.outputs.linears
            row: Row = {"method": method, "global_scale": scale, "seconds": report.seconds}
            row |= {"accuracy_16bit": found.accuracy_16bit, **vars(found.written)}
            row |= {"linear_error": sum(linears.values()) / len(linears), "sqnr_db": report.mean_sqnr_db()}
            row |= {"rows": found.rows(), "held_out": found.held_out}
            if arguments.eval:
                row["task_accuracy"] = graded(str(out), arguments.eval, work / f"eval-{method}-{scale}")
            yield row


def graded(model: str, task: str, out: Path) -> float:
    """Accuracy of greedy answers to 300 questions."""
    from eval.run import run_eval
    from eval.settings import EvalSettings

    return run_eval(EvalSettings(task=task, model=model, limit=300, out=out)).summary.accuracy.value


def random_model(work: Path, arguments: argparse.Namespace) -> tuple[str, str]:
    """A random model in the layout of Llama, with a tokenizer of bytes, and a file of rows for it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=arguments.layers)).bfloat16()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("layernorm.weight"):
                weight.copy_(1 + 0.1 * torch.randn(weight.shape))
                weight[list(OUTLIERS)] *= arguments.outlier
            elif name.endswith("proj.weight"):
                weight.copy_(torch.randn(weight.shape) / weight.shape[1] ** 0.5)
            else:
                weight.copy_(torch.randn(weight.shape) * (1.0 if "embed" in name else 0.1))
        model.model.norm.weight.fill_(1)
    folder = work / "model"
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({word: number for number, word in enumerate(["<eos>", *alphabet])}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    draw = random.Random(0)
    letters = [chr(code) for code in range(33, 127)]
    rows = work / "rows.jsonl"
    texts = ("".join(draw.choices(letters, k=arguments.length)) for _ in range(arguments.size + 40))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(folder), str(rows)


COLUMNS = {
    "method": "method",
    "global_scale": "global scale",
    "logit_error": "logit error",
    "kl": "KL, nats per token",
    "same_top_token": "same top token",
    "accuracy": "next token right",
    "task_accuracy": "answers right",
    "linear_error": "error of linears",
    "sqnr_db": "SQNR of weights, dB",
    "seconds": "seconds",
}
AS_TEXT = {"kl": "{:.2g}", "sqnr_db": "{:.1f}", "seconds": "{:.0f}"}


def page(reports: list[Row]) -> str:
    """A Markdown table for each file."""
    lines = []
    for report in reports:
        rows = report["results"]
        columns = [key for key in COLUMNS if any(key in row for row in rows)]
        sequences, length = report["calibration"]
        measure = next(row["rows"] for row in rows if "rows" in row)
        right = next(row["accuracy_16bit"] for row in rows if "accuracy_16bit" in row)
        lines += [f"## {report['model']}", "", f"`{report['command']}`", ""]
        lines += [f"Calibrated on {sequences} x {length} tokens, measured on {measure}. The 16-bit model predicts "]
        lines[-1] += f"{right:.1%} of the next tokens."
        lines += ["", "| " + " | ".join(COLUMNS[key] for key in columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(cell(key, row.get(key)) for key in columns) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def cell(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return AS_TEXT.get(key, "{:.1%}").format(value)


if __name__ == "__main__":
    main()
