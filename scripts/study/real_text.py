"""How far quantized folders are from their 16-bit model on texts: nats per token, KL divergence, same top token.

    python scripts/study/real_text.py --model checkpoints/smollm2 --folders WORK/rtn WORK/new --out FILE.json \
        --texts gsm8k=gsm8k/test.jsonl aime=aime24/test.jsonl

Each text is a file of rows (jsonl, also gzipped) with a `question` and a `solution` or `answer`, of which the first
`--tokens` tokens are read, without a chat template. Rows that mark themselves as part of an evaluation set, as
duplicates or as another language than English are left out, and so are the first `--skip` of the others. A folder with
a start is measured without it and with its first `--ranks` components. KL is KL(16 bits || folder).

Weights are decoded to bfloat16, and all products are in float32, by transformers alone: no kernel and no layer of qerl
has a part in it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

BATCH = 16
MARKS = ("dup", "conflict", "eval_exact", "eval_near")  # of a row that is left out if one of them says something


def texts_of(file: Path, count: int, skip: int = 0) -> list[str]:
    """The texts of the first `count` usable rows after `skip` of them. Exits if there are fewer."""
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    rows = [json.loads(line) for line in content.decode().split("\n") if line]
    usable = [row for row in rows if row.get("lang", "en") == "en" and not any(map(row.get, MARKS))]
    found = [f"{row['question']}\n{row.get('solution') or row['answer']}" for row in usable[skip : skip + count]]
    if not found:
        sys.exit(f"{file} has {len(usable)} usable rows and --skip leaves out {skip}: write a smaller one")
    return found


def tokens_of(tokenizer: Any, texts: Sequence[str], most: int) -> list[list[int]]:
    """The first `most` tokens of each text that has at least two."""
    return [ids for text in texts if len(ids := tokenizer(text).input_ids[:most]) > 1]


def decoded(folder: Path, device: str) -> Any:
    """The model of a folder, quantized or not, with float32 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    config = AutoConfig.from_pretrained(folder)
    packed = getattr(config, "quantization_config", None) is not None
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if packed else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)
    if (
        packed
    ):  # compressed-tensors keeps a decoded model where it was loaded: its weights go to one of transformers alone
        decoded_weights = model.state_dict()
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict({name: decoded_weights[name].detach().to("cpu") for name in model.state_dict()})
    return model.float().to(device).eval().requires_grad_(False)


def add_start_(model: Any, folder: Path, rank: int, sign: int = 1) -> None:
    """Add the first `rank` components of the start in `folder` to the weights, or take them away again."""
    import torch

    from qerl.checkpoint.base_start import LORA_A, LORA_B, START, BaseStart, read_start

    weights, factors = dict(model.named_parameters()), read_start(BaseStart(folder / START, rank))
    with torch.no_grad():
        for name in (name for name in factors if name.endswith(LORA_A)):
            module = name.removesuffix(LORA_A)
            weight = weights[f"{module}.weight"]
            a, b = (factors[module + part].to(weight.device, torch.float32) for part in (LORA_A, LORA_B))
            weight.add_(b @ a, alpha=sign)


def start_rank(folder: Path) -> int:
    """The components that the start of a folder has; 0 without one."""
    config = folder / "start" / "adapter_config.json"
    return json.loads(config.read_text(encoding="utf-8"))["r"] if config.is_file() else 0


def log_probabilities(model: Any, rows: Sequence[Sequence[int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each row its log probabilities, float32 (tokens - 1, vocabulary), and the tokens that they predict.

    Rows of a batch are padded on the right, which causal attention does not see.
    """
    import torch

    device = next(model.parameters()).device
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.long)
        for place, row in enumerate(part):
            ids[place, : len(row)] = torch.tensor(row)
        with torch.no_grad():
            logits = model(input_ids=ids.to(device), use_cache=False).logits
        for place, row in enumerate(part):
            yield torch.log_softmax(logits[place, : len(row) - 1], -1), ids[place, 1 : len(row)].to(device)


def compare(whole: Any, model: Any, rows: Sequence[Sequence[int]]) -> dict[str, float]:
    """Means over the predicted tokens: `nats` of the model, `kl` of the 16-bit one from it, and `same` top tokens."""
    totals, count = {"nats": 0.0, "kl": 0.0, "same": 0.0}, 0
    for (p, tokens), (q, _) in zip(log_probabilities(whole, rows), log_probabilities(model, rows), strict=True):
        totals["nats"] -= float(q.gather(1, tokens[:, None]).sum())
        totals["kl"] += float((p.exp() * (p - q)).sum())
        totals["same"] += float((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(tokens)
    return {name: round(total / count, 5) for name, total in totals.items()} | {"tokens": count}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """{folder: {text: {"start of rank R" or "no start": numbers}}}, and the same of the 16-bit model."""
    import torch
    from transformers import AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, whole = AutoTokenizer.from_pretrained(args.model), decoded(args.model, device)
    given = dict(text.split("=", 1) for text in args.texts)
    rows = {
        name: tokens_of(tokenizer, texts_of(Path(file), args.rows, args.skip), args.tokens)
        for name, file in given.items()
    }
    found: dict[str, Any] = {"16 bits": {name: {"": compare(whole, whole, ids)} for name, ids in rows.items()}}
    for folder in args.folders:
        model, most, found[folder.name] = decoded(folder, device), start_rank(folder), {name: {} for name in rows}
        for rank in (0, *(rank for rank in args.ranks if rank <= most)):
            if rank:
                add_start_(model, folder, rank)
            for name, ids in rows.items():
                numbers = compare(whole, model, ids)
                found[folder.name][name][f"start of rank {rank}" if rank else "no start"] = numbers
                print(f"{folder.name}, {name}, rank {rank}: {numbers}", flush=True)
            if rank:
                add_start_(model, folder, rank, -1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the 16-bit folder")
    parser.add_argument("--folders", type=Path, nargs="+", required=True, help="quantized from it")
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--rows", type=int, default=256, help="of each text")
    parser.add_argument("--skip", type=int, default=0, help="rows of each text, because a calibration has them")
    parser.add_argument("--tokens", type=int, default=256, help="of each row, at most")
    parser.add_argument("--ranks", type=int, nargs="*", default=[32])
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    from scripts.bench.provenance import command, machine

    report = {"command": command(), **machine(), "folders": measure(args)}
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
